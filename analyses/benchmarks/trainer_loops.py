"""Policies, prompts and training loops (gradscope's and TRL's) for the trainer's benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from analyses.benchmarks.turns import REST
from gradscope.objective import Updater
from gradscope.policy import EMBEDDED, load_policy
from gradscope.runs import Journal
from gradscope.sampling import HFSampler, Sample
from gradscope.tasks import Question, draw_questions, get_task, register
from gradscope.trainer import TrainConfig, get_preset, train
from gradscope.trainer.learner import Learner

Loop = Callable[[Callable[[], None]], None]
"""Calls its argument between two of its steps."""


@dataclass(frozen=True)
class Size:
    """A policy's shape and its batch."""

    name: str
    vocab: int
    hidden: int
    heads: int
    mlp: int
    layers: int = 4
    questions: int = 16
    group: int = 8
    prompt: int = 32
    response: int = 96

    @property
    def config(self) -> Any:
        """Return a configuration whose EOS lies outside the vocabulary and is never sampled."""
        from transformers import Qwen2Config

        return Qwen2Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            intermediate_size=self.mlp,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            pad_token_id=0,
            eos_token_id=self.vocab,
        )


SIZES = (
    Size("embedded", vocab=131, hidden=128, heads=4, mlp=384),
    Size("large", vocab=32_000, hidden=256, heads=4, mlp=688, questions=4),
)


class SameQuestions:
    """A task that asks the same questions at every step."""

    def __init__(self, name: str, questions: list[Question], reward: Callable[[str, Question], float]) -> None:
        self.name, self.asked, self.reward = name, {str(q.prompt): q for q in questions}, reward

    def questions(self, n: int, *, seed: int) -> list[Question]:
        return list(self.asked.values())[:n]


def random_workload(size: Size, folder: Path) -> TrainConfig:
    """Make prompts of random words for a random policy; the reward is a response's share of even words."""
    rng = np.random.default_rng(0)
    prompts = [" ".join(f"w{i}" for i in row) for row in rng.integers(1, size.vocab, (size.questions, size.prompt))]

    def reward(response: str, question: Question) -> float:
        words = response.split()
        return sum(word[-1] in "02468" for word in words) / max(1, len(words))

    register(SameQuestions(f"benchmark-{size.name}", [Question(prompt, None) for prompt in prompts], reward))
    return TrainConfig(
        model=str(save_policy(size, folder / size.name)),
        task=f"benchmark-{size.name}",
        questions_per_step=size.questions,
        group_size=size.group,
        max_new_tokens=size.response,
    )


def puzzle_workload() -> TrainConfig:
    """Return kk-embedded's preset of embedded-certain, one step's puzzles, and a rate too small to change lengths."""
    preset = get_preset("kk-embedded")
    task = get_task(preset.task)
    puzzles = draw_questions(task, preset.questions_per_step, seed=0, people=preset.people)
    register(SameQuestions("benchmark-puzzles", puzzles, task.reward))
    return replace(
        preset, model=str(EMBEDDED["embedded-certain"]), task="benchmark-puzzles", people=(), learning_rate=1e-6
    )


def save_policy(size: Size, folder: Path) -> Path:
    """Save random weights and a tokenizer of the words w1, w2, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(size.config).save_pretrained(folder)
    words = ["<pad>", *(f"w{i}" for i in range(1, size.vocab)), "<eos>"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


_logged: ContextVar[Callable[[dict[str, Any]], None]] = ContextVar("logged")


def our_loop(config: TrainConfig, folder: Path, lengths: list[int]) -> Loop:
    """Train with gradscope inside `telling_steps`; `lengths` gets the number of response tokens of each step."""

    def loop(pass_on: Callable[[], None]) -> None:
        def logged(record: dict[str, Any]) -> None:
            lengths.append(record["num_tokens"])
            pass_on()

        _logged.set(logged)  # of this loop's thread
        train(config, folder, progress=False)

    return loop


@contextmanager
def telling_steps() -> Iterator[None]:
    """Call back each of our loops when its step is logged.

    A callback of the trainer would make it score the tokens before its update.
    """
    log = Journal.log

    def told(journal: Journal, record: dict[str, Any]) -> None:
        log(journal, record)
        _logged.get()(record)

    with mock.patch.object(Journal, "log", told):
        yield


def our_parts() -> dict[tuple[type, str], Any]:
    """Return the methods for `parts_of`; a batch's only optimizer step scores its own tokens."""
    return {
        (HFSampler, "sample"): "sampling",
        (Learner, "statistics"): "old",
        (Learner, "reference_logprobs"): "reference",
        (Updater, "step"): "training",
    }


@contextmanager
def finishing() -> Iterator[None]:
    """Count every response as finished: gradscope refuses to train on a batch of truncated responses only."""
    sample = HFSampler.sample

    def finished(*args: Any, **settings: Any) -> list[list[Sample]]:
        return [[replace(one, finished=True) for one in group] for group in sample(*args, **settings)]

    with mock.patch.object(HFSampler, "sample", finished):
        yield


def trl_loop(config: TrainConfig, folder: Path, lengths: list[int]) -> Loop:
    """Train with TRL's GRPOTrainer under the same settings."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    optimizer_steps = config.num_responses // config.mini_batch_size
    task = get_task(config.task)

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(sum(map(len, completion_ids)))
        return [task.reward(c, task.asked[p]) for p, c in zip(prompts, completions, strict=True)]

    def loop(pass_on: Callable[[], None]) -> None:
        class Between(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % optimizer_steps == 0:
                    pass_on()

        policy = load_policy(config.model, dtype="float32", device="cpu")
        trainer = GRPOTrainer(
            model=policy.model,
            reward_funcs=reward,
            args=_trl_config(config, folder),
            train_dataset=Dataset.from_dict({"prompt": list(task.asked)}),
            processing_class=policy.tokenizer,
            callbacks=[Between()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    return loop


def _trl_config(config: TrainConfig, folder: Path) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        max_steps=config.steps * (config.num_responses // config.mini_batch_size),
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.mini_batch_size // config.micro_batch_size,
        steps_per_generation=config.num_responses // config.micro_batch_size,
        num_generations=config.group_size,
        max_completion_length=config.max_new_tokens,
        temperature=config.temperature,
        beta=config.kl_coef,
        epsilon=config.clip_ratio_low,
        epsilon_high=config.clip_ratio_high,
        delta=config.clip_ratio_c,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def trl_parts() -> dict[tuple[type, str], Any]:
    """Return the methods for `parts_of`; clipping and the optimizer, outside training_step, count as rest."""
    from trl import GRPOTrainer

    def scored(trainer: Any, model: Any, *_: Any, **__: Any) -> str:
        if torch.is_grad_enabled():
            return "training"
        return "reference" if model is trainer.ref_model else "old"

    return {
        (GRPOTrainer, "training_step"): "training",
        (GRPOTrainer, "_generate_and_score_completions"): REST,
        (GRPOTrainer, "_generate_single_turn"): "sampling",
        (GRPOTrainer, "_get_per_token_logps_and_entropies"): scored,
    }
