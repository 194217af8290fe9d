"""Score policies on fixed responses: does a method end with more probability on rare tokens than another?

    python -m analyses.common.measurements horizon

measures, once and before any run of the track `horizon` (docs/named-beforehand.md, experiment B),

    contexts.parquet    the fixed responses: source, group, level, response, finished
    rare_mass.csv       `score` of the policy that all runs start from
    questions.csv       a row per test puzzle: level, and correct, of 16 samples of that policy

The sources are that policy (start), and the runs of GRPO and of Reweight that the decision was drawn from, after 150
steps (seeds 0 to 11; none of them is a run of this track): 400 responses each, to the same 100 puzzles. Every run of
the track is then scored on them by `judge_further`, which keeps beside the run

    rare_mass.csv       `score` of each of its checkpoints
    hard.csv            a row per test puzzle whose pass@4 at the start is below .8: level, and correct, of 16 samples
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.nn.utils.rnn import pad_sequence

import analyses.common.puzzles  # noqa: F401  (registers the test)
from analyses.common.experiments import Run, find_run
from analyses.common.kept_runs import read_tables
from analyses.common.measurements import keep, read_table
from analyses.common.tables import write_csv
from gradscope import load_policy
from gradscope.policy import Policy
from gradscope.sampling import evaluate, make_sampler
from gradscope.tasks import Question, draw_questions, get_task
from gradscope.trainer import step_of

SCALE, TRACK = "cpu", "horizon"
RARE = 0.25
"""Tokens of less probability are rare."""
SOURCES = ("grpo", "reweight")
"""Variants of the track `puzzles` whose responses are read, beside those of the start."""
SEEDS, PUZZLES, RESPONSES = 12, 100, 4
SAMPLES, HARD = 16, 0.8
SAMPLING_SEED = 1
"""Differs from that of the tests, whose samples the hard puzzles must not be chosen by."""


def measure(out: Path) -> None:
    """Sample from the starting policy, gather the fixed responses, and score the policy on them."""
    run = find_run(SCALE, TRACK)
    policy = load_policy(run.config.model)
    sampled = _sample(policy, run, _questions(run))
    start = sampled[sampled["group"] < PUZZLES].groupby("group").head(RESPONSES)
    others = [_kept_responses(variant).assign(source=variant) for variant in SOURCES]
    contexts = pd.concat([start.assign(source="start"), *others], ignore_index=True)
    contexts = contexts[["source", "group", "level", "response", "finished"]]
    tables = {
        "contexts.parquet": contexts,
        "rare_mass.csv": score(policy, contexts, run).assign(step=0),
        "questions.csv": _count(sampled),
    }
    keep(out, tables, samples=SAMPLES, puzzles=PUZZLES, responses=RESPONSES, rare=RARE)


def judge_further(run: Run, checkpoints: Sequence[Path], kept: Path) -> None:
    """Score a finished run's checkpoints on the fixed responses, and count what its last one solves of hard puzzles."""
    contexts = read_table("horizon", "contexts.parquet", scale=SCALE)
    frames = [score(load_policy(str(path)), contexts, run).assign(step=step_of(path)) for path in checkpoints]
    write_csv(pd.concat(frames, ignore_index=True), kept / "rare_mass.csv", float_format="%.8g")
    hard = hard_puzzles(read_table("horizon", "questions.csv", scale=SCALE))
    questions = _questions(run)
    sampled = _sample(load_policy(str(checkpoints[-1])), run, [questions[group] for group in hard["group"]])
    found = _count(sampled)
    write_csv(found.assign(group=hard["group"].to_numpy()[found["group"]]), kept / "hard.csv")


def hard_puzzles(questions: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of questions.csv whose pass@4, estimated without bias from all samples, is below HARD."""
    wrong = SAMPLES - questions["correct"].to_numpy()
    draws = np.arange(RESPONSES)
    # 1 − C(wrong, 4) / C(16, 4): the probability that four of the samples have a correct one among them.
    pass_at_4 = 1 - np.prod(np.maximum(wrong[:, None] - draws, 0) / (SAMPLES - draws), axis=1)
    return questions[pass_at_4 < HARD]


def score(policy: Policy, contexts: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Return a row per source: what the policy would write at every place of the fixed responses.

    Columns: source, places, mass (Σ_v π(v)·1[π(v) < ¼], mean over places), entropy (nats, mean), and share (of the
    responses' own tokens that have π < ¼). π is at the temperature of training, over the whole vocabulary.
    """
    questions = _questions(run)
    rows = []
    for source, own in contexts.groupby("source", sort=False):
        numbers = torch.cat(list(_places(policy, own, questions, run.config.temperature)))
        mass, entropy, rare = numbers.mean(0).tolist()
        rows.append({"source": source, "places": len(numbers), "mass": mass, "entropy": entropy, "share": rare})
    return pd.DataFrame(rows)


@torch.no_grad()
def _places(
    policy: Policy, contexts: pd.DataFrame, questions: Sequence[Question], temperature: float, size: int = 32
) -> Iterator[torch.Tensor]:
    """Yield [places, 3] in float64: mass on rare tokens, entropy, and whether the response's own token is rare."""
    [end] = policy.stop_ids
    for at in range(0, len(contexts), size):
        prompts, responses = [], []
        for row in contexts.iloc[at : at + size].itertuples():
            prompts.append(policy.encode_prompt(questions[row.group].prompt))
            responses.append(policy.encode_response(row.response) + [end] * row.finished)
        sequences = [torch.tensor(a + b) for a, b in zip(prompts, responses, strict=True)]
        ids = pad_sequence(sequences, batch_first=True)
        seen = pad_sequence([torch.ones_like(one) for one in sequences], batch_first=True)
        logprobs = (policy.model(ids, attention_mask=seen).logits.double() / temperature).log_softmax(-1)
        for logs, own, prompt in zip(logprobs, sequences, prompts, strict=True):
            logs, own = logs[len(prompt) - 1 : len(own) - 1], own[len(prompt) :]
            probs = logs.exp()
            mass = (probs * (probs < RARE)).sum(-1)
            yield torch.stack([mass, -(probs * logs).sum(-1), (probs.gather(1, own[:, None])[:, 0] < RARE).double()], 1)


def _questions(run: Run) -> list[Question]:
    """Draw the track's test puzzles, as `make_run.ask` does."""
    return draw_questions(get_task(run.test.task), run.test.questions, seed=0, people=run.test.people)


def _sample(policy: Policy, run: Run, questions: Sequence[Question]) -> pd.DataFrame:
    """Sample and grade SAMPLES responses to each question."""
    with closing(make_sampler("hf", policy, batch_size=256, progress=False)) as sampler:
        found = evaluate(
            policy,
            get_task(run.test.task),
            questions,
            k=SAMPLES,
            temperature=run.test.temperature,
            max_new_tokens=run.test.max_new_tokens,
            seed=SAMPLING_SEED,
            sampler=sampler,
        )
    return found.responses[~found.responses["greedy"]]


def _count(sampled: pd.DataFrame) -> pd.DataFrame:
    """Return a row per question: group, level, samples and how many are correct."""
    by_question = sampled.groupby(["group", "level"], sort=True)["correct"]
    return by_question.agg(samples="size", correct="sum").reset_index()


def _kept_responses(variant: str) -> pd.DataFrame:
    """Return RESPONSES sampled responses to each of PUZZLES puzzles, each puzzle's by as many seeds' runs."""
    rows = []
    kept = read_tables(SCALE, "puzzles", variant, "responses")
    for seed in range(SEEDS):
        found = kept[seed]
        sampled = found[~found["greedy"] & (found["group"] < PUZZLES)]
        turn = SEEDS // RESPONSES
        rows.append(sampled[sampled["group"] % turn == seed % turn].groupby("group").head(1))
    return pd.concat(rows, ignore_index=True)
