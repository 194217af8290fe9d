"""Train the policy of the math runs at scale cpu: a tiny Qwen2 that adds and subtracts step by step, often wrongly.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python -m analyses.recipes.arithmetic_policy

It is trained from scratch, character by character, on questions of analyses/common/sums.py outside the test, and stops
before its sums are reliable. A last stage teaches slips, and answers without steps, more often for longer questions, so
that reinforcement learning has more to improve. It is then judged like the runs (math/untrained.csv). The seed fixes
questions, slips and initial weights; another number of threads or version of torch gives other weights of the same
quality, so the repository keeps these.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from analyses.common.experiments import RUNS, list_runs
from analyses.common.make_run import judge
from analyses.common.math_tracks import BEFORE
from analyses.common.script import exit_with
from analyses.common.sums import STEPS, draw_terms, is_of_test, write_question, write_steps
from analyses.common.tables import write_csv
from analyses.recipes.supervised import EOS, PAD, UNKNOWN, Stage, batches, open_log, train


@dataclass(frozen=True)
class SumsStage(Stage):
    """A training stage on sums; `write` is for puzzles."""

    noise: float = 0.0
    """Share of steps with a slip."""
    bare: float = 0.0
    """Share of answers without steps, times the number of steps."""


STAGES = (
    SumsStage("steps", steps=1800, batch=32, lr=(3e-3, 3e-4)),
    SumsStage("habits", steps=200, batch=32, lr=(6e-4, 1e-4), noise=0.03, bare=0.06),
)


@dataclass(frozen=True)
class Options:
    out: Path = RUNS / "cpu"
    """Gets arithmetic-policy/, and math/untrained.csv."""
    log: Path = Path("analyses/recipes/logs/arithmetic_policy.jsonl")
    seed: int = 0


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make every printable ASCII character and the line break a token."""
    vocabulary = {word: i for i, word in enumerate([EOS, PAD, UNKNOWN, "\n", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Build the untrained policy."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=192,
        max_position_embeddings=128,
        rope_theta=1000.0,
        # Four times transformers' own, from which this size learns far more slowly.
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def examples(
    tokenizer: PreTrainedTokenizerFast, stage: SumsStage, rng: random.Random
) -> Iterator[tuple[list[int], int]]:
    """Yield (ids of prompt and response, length of the prompt) endlessly."""
    while True:
        terms = draw_terms(rng.choice(STEPS), rng)
        prompt = write_question(terms)
        if is_of_test(prompt):
            continue
        bare = rng.random() < stage.bare * (len(terms) - 1)
        response = f"={sum(terms)}" if bare else write_steps(terms, rng=rng, noise=stage.noise)
        prompt_ids = tokenizer.encode(prompt)
        yield [*prompt_ids, *tokenizer.encode(response), tokenizer.eos_token_id], len(prompt_ids)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    log = open_log(options.log, append=False)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    log(event="start", seed=options.seed, parameters=model.num_parameters(), vocabulary=len(tokenizer))
    for stage in STAGES:
        rng = random.Random(f"{options.seed} {stage.name}")
        train(model, stage, batches(examples(tokenizer, stage, rng), stage.batch, rng), log)
    folder = options.out / "arithmetic-policy"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    test = next(run.test for run in list_runs("cpu") if run.track == "math")
    table = judge(folder, test).table
    (options.out / "math").mkdir(parents=True, exist_ok=True)
    write_csv(table.assign(step=0), options.out / "math" / BEFORE, float_format="%.6g")
    for row in table.to_dict("records"):
        log(level=row["level"], **{name: round(row[name], 4) for name in _LOGGED})


_LOGGED = ("greedy_accuracy", "avg@16", "pass@16", "sampled_format_rate", "sampled_tokens")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
