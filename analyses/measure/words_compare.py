"""Measure what every token weighting would do with batches of the pretrained policy, off-policy and after training too.

The policies are the one that starts the run of track words-stale (warm-started in varied wording), the one after its
four GRPO steps, and the one at the end of the GRPO run of track varied-low at seed 21; each answers 16 validation
problems × 8. Three cases: the first policy on its own responses; the second on the first's (as if rollouts were some
steps old), four to a problem for the time that it takes; and the third on its own. Writes, with a column `case`,

    weightings.csv      a row per weighting and optimizer step: `Comparison.table`
    by_interval.csv     a row per weighting, step and interval of π: `Comparison.by_interval`
    products.parquet    inner products of each weighting's sum by prompt: `products_by_prompt`
    tokens.parquet      the token table that they were compared on
    samples.csv         of each case: responses, tokens, accuracy, and problems whose responses differ in reward
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pandas as pd

import analyses.common.dealt_problems  # noqa: F401  (registers its tasks)
from analyses.common.experiments import WORK, Run, find_run
from analyses.common.in_training import FRESH
from analyses.common.measurements import keep, part
from analyses.measure import real_language
from analyses.measure.pretrained_batches import sample
from gradscope import load_policy, measure as measure_tokens
from gradscope.errors import InputError
from gradscope.gradients import Resources
from gradscope.sampling import batch_rows
from gradscope.trainer import list_checkpoints
from gradscope.updates import Comparison, compare

RESPONSES = 8
CASES = {
    "on-policy": ("start", "start", RESPONSES),
    "older rollouts": ("later", "start", 4),
    "after training": ("trained", "trained", RESPONSES),
}
"""{case: (measured policy, whose responses, how many to each problem)}."""
TABLES: dict[str, Callable[[Comparison], pd.DataFrame]] = {
    "weightings": lambda comparison: comparison.table,
    "by_interval": lambda comparison: comparison.by_interval,
    "products": lambda comparison: products_by_prompt(comparison),
}


def measure(
    out: Path,
    *,
    questions: int = 16,
    folders: tuple[str, str, str] | None = None,
    task: str | None = None,
    weightings: tuple[str, ...] | None = None,
) -> None:
    """Sample a batch of each policy, compare on each case, and keep the tables.

    folders, task: the three policies and their questions; None: the runs'. weightings: None for `compare`'s default.
    """
    policies = dict(zip(("start", "later", "trained"), map(load_policy, folders or find_policies()), strict=True))
    run = find_run("words", "words-stale")
    test, config = run.test, run.config
    settings = {"n": RESPONSES, "temperature": config.temperature, "max_new_tokens": config.max_new_tokens}
    draw = partial(sample, name=task or test.task, questions=questions, seed=FRESH, **settings)
    rows = {name: draw(policies[name]) for name in dict.fromkeys(sampler for _, sampler, _ in CASES.values())}
    found: dict[str, list[pd.DataFrame]] = {name: [] for name in (*TABLES, "tokens")}
    samples = []
    for case, (name, sampler, count) in CASES.items():
        own = rows[sampler].groupby("group").head(count)
        samples.append(describe(own).assign(case=case))
        batch = batch_rows(own.to_dict("records"), on_policy=name == sampler)
        measured = partial(measure_tokens, policies[name], batch, tokens_per_interval="enough")
        tokens = part(out, f"tokens {case}", measured)
        resources = Resources(micro_batch=4, progress=True)
        once = cache(partial(compare, policies[name], batch, weightings, table=tokens, resources=resources))
        found["tokens"].append(tokens.assign(case=case))
        for table, make in TABLES.items():
            frame = part(out, f"{table} {case}", lambda once=once, make=make: make(once()))
            found[table].append(frame.assign(case=case))
    tables = {name: pd.concat(frames) for name, frames in found.items()}
    kept = {f"{name}.csv": tables[name] for name in ("weightings", "by_interval")}
    kept |= {"products.parquet": tables["products"], "tokens.parquet": tables["tokens"].astype(real_language.SMALL)}
    keep(out, kept | {"samples.csv": pd.concat(samples)}, questions=questions, responses=RESPONSES)


def products_by_prompt(comparison: Comparison) -> pd.DataFrame:
    """Return a row per prompt and distinct sum U = Σ_p u_p, from which norms, cosines and signals follow.

    Columns: method, step, prompt (from 0, by group); own, ‖u_p‖²; along, ⟨u_p, U⟩; own_plain, to_plain and from_plain,
    the products of u_p with plain's u_p and U, and of plain's u_p with U; kernel.Q, ⟨u_p, u_q⟩ for each prompt q,
    possibly sketched.
    """
    sums = comparison.table[(comparison.table["same_as"] == "") & (comparison.table["step"] != "both")]
    parts = comparison.passes.products
    names = [name for name in parts._fields if name != "kernel"]
    frames = []
    for place, (method, step) in enumerate(zip(sums["method"], sums["step"], strict=True)):
        own = pd.DataFrame({name: getattr(parts, name)[place] for name in names})
        kernel = pd.DataFrame(parts.kernel[place], columns=[f"kernel.{q}" for q in range(len(own))])
        keys = pd.DataFrame({"method": method, "step": step, "prompt": range(len(own))})
        frames.append(pd.concat([keys, own, kernel], axis=1))
    return pd.concat(frames, ignore_index=True)


def find_policies() -> tuple[str, str, str]:
    """Return the policy that starts the run of four steps, and both runs' last. Raises InputError if one is missing."""
    short, long = find_run("words", "words-stale"), find_run("words", "varied-low", "grpo", 21)
    return short.config.model, *(str(find_last(run)) for run in (short, long))


def find_last(run: Run) -> Path:
    """Return a run's last checkpoint."""
    work = WORK / run.place
    if not (checkpoints := list_checkpoints(work)):
        command = "GRADSCOPE_RUNS=FOLDER python -m analyses.reproduce --scale words --only words_compare"
        raise InputError(f"{work} has no checkpoint; make the run again, kept in another folder: {command}")
    return checkpoints[-1]


def describe(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row: responses, tokens, share of right ones, and problems whose responses differ in reward."""
    unlike = int((table.groupby("group")["reward"].nunique() > 1).sum())
    tokens = int(table["response_ids"].map(len).sum())
    row = {"responses": len(table), "tokens": tokens, "accuracy": table["correct"].mean(), "unlike_problems": unlike}
    return pd.DataFrame([row])
