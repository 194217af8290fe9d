"""Time of the trainer: a step against TRL's GRPOTrainer, Lopti's training against plain, and a step by its parts.

    python -m analyses.benchmarks.trainer --out figures/benchmark_trainer.csv

CPU time (of one thread) and wall time; medians over rounds in which everything compared does one step, in turn, in one
process; a first step of each is not counted. Ratios are medians of the rounds' own. Policies: "embedded" has the shape
of the policy that comes with gradscope, "large" hidden 256, 4 layers, vocabulary 32,000; both Qwen2, tied, float32.

    trl      gradscope's whole step, logging included, over that of TRL (transformers' generate, no gradient
             checkpointing, no bfloat16), each at the best of the micro-batch sizes: the same prompts, reward,
             temperature, KL and optimizer steps per batch. "embedded" and "large" have random weights and an EOS
             outside their vocabulary, so that all responses are equally long; "puzzles" is the real embedded policy on
             its puzzles, with responses as they come, of equal length in the mean. Where a batch makes one optimizer
             step, TRL takes the training pass's own log-probabilities for π_old; gradscope computes them beforehand.
    lopti    All optimizer steps on one batch. "large" has random weights and responses, so η is set at the quantile of
             π_old below which the wanted share of tokens lies, spread over all responses (the paper's policies: 19 %
             below ¼, 29 % below ½); "embedded" is the real one with its own responses at η = ½. Beside the times, the
             products' FLOPs by gradscope.cost: Lopti computes the blocks twice and the head once for each token.
    parts    Steps of the preset kk-embedded, the real policy and puzzles, with and without Lopti (Table 6, in small).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
import tyro

from analyses.benchmarks.turns import REST, Turns, parts_of, read_clocks
from gradscope.batch import Response, TokenBatch, collate
from gradscope.batch_logprobs import batch_statistics, micro_batches
from gradscope.cli_shared import quiet_transformers
from gradscope.cost import ModelShape, Piece, forward_flops
from gradscope.models import EMBEDDED, Policy, load_policy
from gradscope.sampling import Sample
from gradscope.sampling.hf import HFSampler
from gradscope.sampling.rollouts import batch_rows, rollout_rows
from gradscope.steps import Pass, Updater
from gradscope.tasks import Question, draw_questions, get_task, register
from gradscope.trainer.algorithm import Update, compute_advantages, plan_update
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.learner import Learner
from gradscope.trainer.loop import train
from gradscope.trainer.presets import get_preset

INSTALL_TRL = "trl is not installed, so the comparison with it is left out; to have it: pip install -e '.[bench]'"
OURS, TRL, PLAIN, LOPTI = "gradscope", "TRL", "plain", "Lopti"
PARTS = ("sampling", "old", "reference", "training", REST)
DIGITS = 3


@dataclass(frozen=True)
class Size:
    """A policy's shape, and a batch for it."""

    name: str
    vocab: int
    hidden: int
    heads: int
    mlp: int
    layers: int = 4
    questions: int = 16
    group: int = 8
    prompt: int = 32
    response: int = 64

    @property
    def config(self) -> Any:
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
SETTINGS = ((0.0, 1), (0.001, 1), (0.001, 2))
"""KL coefficient and optimizer steps per batch; the last is the preset's."""
SHARES = (0.2, 0.3, 0.4)
"""Of low-probability tokens."""


@dataclass(frozen=True)
class Options:
    """Settings of the benchmark."""

    comparisons: tuple[Literal["trl", "lopti", "parts"], ...] = ("trl", "lopti", "parts")
    policies: tuple[str, ...] = ("embedded", "large", "puzzles")
    micro_batches: tuple[int, ...] = (8, 16, 32)
    """Responses in one forward pass: those tried by both trainers; the first is Lopti's and plain's."""
    rounds: int = 5
    out: Path | None = None
    """CSV to write."""


class SameQuestions:
    """A task that asks the same questions in every step."""

    def __init__(self, name: str, questions: list[Question], reward: Callable[[str, Question], float]) -> None:
        self.name, self.asked, self.reward = name, {str(q.prompt): q for q in questions}, reward

    def questions(self, n: int, *, seed: int) -> list[Question]:
        return list(self.asked.values())[:n]


def random_workload(size: Size, folder: Path) -> TrainConfig:
    """Prompts of random words for a policy of random weights; rewarded is the share of even words in the response."""
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
    """The preset kk-embedded, with the same puzzles in every step."""
    preset = get_preset("kk-embedded")
    task = get_task(preset.task)
    puzzles = draw_questions(task, preset.questions_per_step, seed=0, people=preset.people)
    register(SameQuestions("benchmark-puzzles", puzzles, task.reward))
    return replace(preset, model=str(EMBEDDED), task="benchmark-puzzles", people=(), learning_rate=1e-6)


def save_policy(size: Size, folder: Path) -> Path:
    """Random weights and a tokenizer of the words w1, w2, …, whose EOS the policy cannot sample."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(size.config).save_pretrained(folder)
    words = ["<pad>", *(f"w{i}" for i in range(1, size.vocab)), "<eos>"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


def compare_trainers(
    policy: str, workload: TrainConfig, options: Options, folder: Path, names: tuple[str, ...] = (OURS, TRL)
) -> pd.DataFrame:
    """A row per trainer and micro-batch size."""
    config = replace(workload, steps=options.rounds + 1, trackers=(), device="cpu")
    loops = {
        (name, micro): {OURS: our_loop, TRL: trl_loop}[name](
            replace(config, micro_batch_size=micro), folder / f"{name}-{micro}"
        )
        for micro in options.micro_batches
        for name in names
    }
    turns = Turns(loops)
    with parts_of(turns, our_parts() | (trl_parts() if TRL in names else {})), finishing():
        steps = turns.run()
    table = pd.DataFrame([{"method": n, "micro_batch": m} | summarise(s) for (n, m), s in steps.items()])
    optimizer_steps = config.num_responses // config.mini_batch_size
    table.insert(0, "setting", f"KL {config.kl_coef:g}, {optimizer_steps} optimizer step{'s' * (optimizer_steps > 1)}")
    table.insert(0, "policy", policy)
    table.insert(0, "comparison", "trl")
    return add_ratio(table, steps, OURS, TRL) if TRL in names else table


def our_loop(config: TrainConfig, folder: Path) -> Callable[[Callable[[], None]], None]:
    def loop(pass_on: Callable[[], None]) -> None:
        @contextmanager
        def between(step: Any) -> Iterator[None]:
            pass_on()
            yield

        train(config, folder, on_step=between, progress=False)

    return loop


def our_parts() -> dict[tuple[type, str], Any]:
    return {
        (HFSampler, "sample"): "sampling",
        (Learner, "statistics"): "old",
        (Learner, "reference_logprobs"): "reference",
        (Updater, "step"): "training",
    }


@contextmanager
def finishing() -> Iterator[None]:
    """Let every response count as finished: gradscope refuses to train on a batch all of which was cut off."""
    from unittest import mock

    sample = HFSampler.sample

    def finished(*args: Any, **settings: Any) -> list[list[Sample]]:
        return [[replace(one, finished=True) for one in group] for group in sample(*args, **settings)]

    with mock.patch.object(HFSampler, "sample", finished):
        yield


def trl_loop(config: TrainConfig, folder: Path) -> Callable[[Callable[[], None]], None]:
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    optimizer_steps = config.num_responses // config.mini_batch_size
    task = get_task(config.task)

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [task.reward(c, task.asked[p]) for p, c in zip(prompts, completions, strict=True)]

    def loop(pass_on: Callable[[], None]) -> None:
        class Between(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % optimizer_steps == 0:
                    pass_on()

        settings = GRPOConfig(
            output_dir=str(folder),
            max_steps=config.steps * optimizer_steps,
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
        policy = load_policy(config.model, dtype="float32", device="cpu")
        trainer = GRPOTrainer(
            model=policy.model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": list(task.asked)}),
            processing_class=policy.tokenizer,
            callbacks=[Between()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    return loop


def trl_parts() -> dict[tuple[type, str], Any]:
    """Clipping and the optimizer, which are not in training_step, count as rest."""
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


def summarise(steps: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Medians over the counted steps, with the range of the CPU time; CPU seconds by part."""
    totals = np.array([sum(step.values()) for step in steps])
    cpu, wall = totals.T
    row = {"cpu_s": np.median(cpu), "cpu_min": cpu.min(), "cpu_max": cpu.max(), "wall_s": np.median(wall)}
    present = {part for step in steps for part in step}
    row |= {f"cpu_{p}": np.median([step.get(p, (0.0, 0.0))[0] for step in steps]) for p in PARTS if p in present}
    return row | {f"wall_{p}": np.median([step.get(p, (0.0, 0.0))[1] for step in steps]) for p in PARTS if p in present}


def add_ratio(table: pd.DataFrame, steps: dict[Any, list], method: str, other: str) -> pd.DataFrame:
    """`cpu_ratio` and `wall_ratio`, in the row of `method`'s best micro-batch size: over `other` at its own best."""
    best = table.loc[table.groupby("method").cpu_s.idxmin()].set_index("method").micro_batch
    rounds = zip(steps[method, best[method]], steps[other, best[other]], strict=True)
    over = [sum(ours.values()) / sum(theirs.values()) for ours, theirs in rounds]
    row = (table.method == method) & (table.micro_batch == best[method])
    table.loc[row, ["cpu_ratio", "wall_ratio"]] = np.median(over, axis=0)
    return table


def compare_lopti(size: Size, options: Options) -> pd.DataFrame:
    """A row for plain and for Lopti at each share of low tokens: all optimizer steps on one batch."""
    config = TrainConfig(mini_batch_size=size.questions * size.group // 2, micro_batch_size=options.micro_batches[0])
    if size.name == "embedded":
        policy, batch, etas = *sampled_batch(size), [0.5]
    else:
        policy, batch = random_batch(size)
        old = batch_statistics(policy.model, batch, micro_batch_size=8, device=policy.device).logprob
        etas = [float(old[batch.response_mask].quantile(share).exp()) for share in SHARES]
    batch = with_old_logprobs(policy, batch, config)
    plans = {None: config} | {eta: replace(config, lopti_eta=eta) for eta in etas}
    updates = {eta: plan_update(batch, c, torch.Generator().manual_seed(0)) for eta, c in plans.items()}
    seconds = time_updates(policy, updates, config, options.rounds)
    rows = []
    for eta, update in updates.items():
        cpu, wall = seconds[eta].T
        ratio = np.median(seconds[eta] / seconds[None], axis=0)
        rows.append(
            {"setting": "all optimizer steps on one batch", "method": PLAIN if eta is None else LOPTI}
            | {"micro_batch": config.micro_batch_size, "low_share": low_share(update.passes, batch)}
            | {"cpu_s": np.median(cpu), "cpu_min": cpu.min(), "cpu_max": cpu.max(), "wall_s": np.median(wall)}
            | {"cpu_ratio": ratio[0], "wall_ratio": ratio[1]}
            | training_gflops(policy, update.passes, config.micro_batch_size)
        )
    table = pd.DataFrame(rows)
    table.insert(0, "policy", size.name)
    table.insert(0, "comparison", "lopti")
    return table


def time_updates(policy: Policy, updates: dict[Any, Update], config: TrainConfig, rounds: int) -> dict[Any, np.ndarray]:
    """CPU and wall seconds of each round [rounds, 2], after one that is not counted."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.learning_rate)
    updater = Updater(policy.model, optimizer, policy.device, config.micro_batch_size, config.max_grad_norm)
    seconds: dict[Any, list[np.ndarray]] = {key: [] for key in updates}
    for _ in range(rounds + 1):
        for key, update in updates.items():
            start = read_clocks()
            for part in update.passes:
                updater.step(part, update.settings)
            seconds[key].append(read_clocks() - start)
    return {key: np.array(values[1:]) for key, values in seconds.items()}


def random_batch(size: Size) -> tuple[Policy, TokenBatch]:
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    policy = Policy(Qwen2ForCausalLM(size.config).eval(), None, "model.layers")
    rows = torch.randint(1, size.vocab, (size.questions * size.group, size.prompt + 2 * size.response)).tolist()
    responses = [Response(row[: size.prompt], row[size.prompt :], k // size.group) for k, row in enumerate(rows)]
    return policy, collate([replace(r, reward=float(k % 3), temperature=0.7) for k, r in enumerate(responses)])


def sampled_batch(size: Size) -> tuple[Policy, TokenBatch]:
    policy, config = load_policy("embedded", dtype="float32", device="cpu"), get_preset("kk-embedded")
    task = get_task(config.task)
    rows = rollout_rows(
        policy,
        draw_questions(task, size.questions, seed=0, people=config.people),
        sampler=HFSampler(policy, progress=False),
        n=size.group,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=0,
        task=task,
    )
    return policy, batch_rows(rows)


def with_old_logprobs(policy: Policy, batch: TokenBatch, config: TrainConfig) -> TokenBatch:
    """With π_old = π_ref = the policy, and advantages."""
    size = config.micro_batch_size
    old = batch_statistics(policy.model, batch, micro_batch_size=size, device=policy.device).logprob
    batch = replace(batch, old_logprobs=old, ref_logprobs=old)
    return replace(batch, advantages=compute_advantages(batch, config))


def low_share(passes: list[Pass], batch: TokenBatch) -> float:
    return sum(part.batch.num_tokens for part in passes if part.name == "low") / batch.num_tokens


def training_gflops(policy: Policy, passes: list[Pass], micro_batch_size: int) -> dict[str, float]:
    """Of the products of all forward and backward passes, in the blocks and in the head."""
    shape = ModelShape.from_config(policy.config)
    pieces = [piece for part in passes for _, piece in micro_batches(part.batch, micro_batch_size)]
    blocks = sum(forward_flops(shape, Piece(*piece.input_ids.shape, kept=0)) for piece in pieces)
    head = sum(2 * shape.hidden * shape.vocab * piece.num_tokens for piece in pieces)
    # Each product has two gradients.
    return {"gflop_blocks": 3 * blocks / 1e9, "gflop_head": 3 * head / 1e9}


def time_parts(options: Options, folder: Path, preset: TrainConfig | None = None) -> pd.DataFrame:
    """A row for plain and for Lopti: whole steps of the trainer, by part."""
    preset = get_preset("kk-embedded") if preset is None else preset
    plain = replace(preset, steps=options.rounds + 1, trackers=(), device="cpu")
    configs = {PLAIN: plain, LOPTI: replace(plain, lopti_eta=0.5)}
    turns = Turns({name: our_loop(config, folder / name) for name, config in configs.items()})
    with parts_of(turns, our_parts()):
        steps = turns.run()
    rows = [{"method": name, "micro_batch": plain.micro_batch_size} | summarise(s) for name, s in steps.items()]
    table = pd.DataFrame(rows)
    for column in ("cpu", "wall"):
        training = table[f"{column}_training"]
        table[f"{column}_ratio"] = training / training[0]
    table.insert(0, "setting", "seconds of a step; the ratio is that of training")
    table.insert(0, "policy", "embedded")
    table.insert(0, "comparison", "parts")
    return table


def comparisons(options: Options, folder: Path) -> Iterator[pd.DataFrame]:
    """One table after the other."""
    sizes = [size for size in SIZES if size.name in options.policies]
    if "trl" in options.comparisons and importlib.util.find_spec("trl") is None:
        print(INSTALL_TRL)
    elif "trl" in options.comparisons:
        workloads = {size.name: random_workload(size, folder) for size in sizes}
        if "puzzles" in options.policies:
            workloads["puzzles"] = puzzle_workload()
        for policy, workload in workloads.items():
            for kl_coef, steps in SETTINGS:
                config = replace(workload, kl_coef=kl_coef, mini_batch_size=workload.num_responses // steps)
                yield compare_trainers(policy, config, options, folder / f"{policy}-{kl_coef}-{steps}")
    if "lopti" in options.comparisons:
        yield from (compare_lopti(size, options) for size in sizes)
    if "parts" in options.comparisons:
        yield time_parts(options, folder / "parts")


def main(options: Options) -> None:
    torch.set_num_threads(1)
    quiet_transformers()
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for table in comparisons(options, Path(folder)):
            tables.append(table.dropna(axis=1, how="all").round(DIGITS))
            print(tables[-1].to_string(index=False), flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                pd.concat(tables, ignore_index=True).to_csv(options.out, index=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
