"""Describe a comparison in words and a text table, including the limits of a single batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

import numpy as np
import pandas as pd

from gradscope.resampling import in_brackets
from gradscope.runs import counted, digits
from gradscope.updates.comparison.result import Comparison

ALIKE = 0.95
"""If the cosine's lower bound is at least this, the weighting is said to change only the step's size."""
SCALE = "AdamW largely cancels a common factor of all gradients; the learning rate sets the size of its steps."
ONE_BATCH = """No number from one batch is known to predict how well a run ends.
This describes one batch: which gradients each weighting enlarges, and whether the update stands out from the noise
between prompts. Nearly equal weights give a cosine near 1 if token gradients are orthogonal; only its difference
from the cosine that the energies alone would give says something about their directions."""
WHAT_STAYS = """95 % intervals are over prompts, including those without a gradient; with fewer than six others there
are none. Thresholds over the batch (quantiles of entropy, covariances), random draws and, for directions, the update
itself are held fixed."""


def describe(comparison: Comparison) -> str:
    """Return the whole description: design, duplicates, numbers, signal, gains, notes and limitations.

    Of too few prompts it has what a comparison takes, and which weightings coincide, but no numbers.
    """
    parts = [_design(comparison), comparison.too_few, _same(comparison)]
    if not comparison.too_few:
        sentences = "\n".join(weighting_sentences(comparison))
        parts += [sentences, _numbers(comparison), signal_sentence(comparison), gain_sentence(comparison)]
    parts += comparison.notes
    return "\n\n".join(part for part in (*parts, f"{WHAT_STAYS}\n{ONE_BATCH}") if part)


def signal_sentence(comparison: Comparison) -> str:
    """Say whether the plain update's signal differs from 0, and at how many prompts it would equal the noise."""
    row = comparison.table.iloc[0]
    value, lower, upper = (row[f"signal_to_noise{end}"] for end in ("", "_lower", "_upper"))
    n = comparison.num_prompts
    if comparison.too_few:
        return comparison.too_few
    if not np.isfinite(lower):
        return "Whether the update has a signal was not judged: its signal to noise has no interval."
    told = f"{digits(value)}{in_brackets(lower, upper, digits)} for one prompt"
    found = f"plain {comparison.plain}'s signal to noise is {told}"
    if lower > 0:
        return f"The update has a signal: {found}, so signal equals noise at about {_prompts(value)} prompts."
    if upper <= 0:
        return f"These {n} prompts show no signal: {found}."
    needed = f"Signal equals noise at {_prompts(upper)} prompts or more."
    if ceil(1 / upper) <= n:
        needed = "There are too few prompts to say how many would be needed."
    return f"On these {n} prompts the update's signal cannot be distinguished from 0: {found}. {needed}"


def gain_sentence(comparison: Comparison) -> str:
    """Say what each weighting's step gains on unseen prompts, and how well that predicts; "" without gains."""
    table = comparison.table
    if "gain" not in table:
        return ""
    rows = table[(table["same_as"] == "") & table["gain"].notna()].set_index("method")
    [own, *others] = [f"{name} {cell}" for name, cell in zip(rows.index, _gains(rows), strict=True)]
    told = f"; minus {comparison.plain}'s: {', '.join(others)}" if others else ""
    return (
        "First-order gain in expected reward of one AdamW step (two, if the weighting takes two) on unseen prompts, as "
        "if the policy itself had sampled all responses; each step is made from one half of the prompts and judged on "
        f"the other: {own}{told}.\nIn a preregistered trial this predicted rewards no better than the number of "
        "optimizer steps does (docs/comparing.md)."
    )


def weighting_sentences(comparison: Comparison) -> list[str]:
    """Say of each weighting that differs from the plain update what it does to this batch's; none of too few prompts.

    Where the cosine's lower bound is at least `ALIKE`, the weighting is said to change only the step's size; where its
    upper bound is below, the direction.
    """
    if comparison.too_few:
        return []
    table, sentences = comparison.table, []
    rows = table[(table["same_as"] == "") & table["cosine"].notna()].iloc[1:]
    for _, row in rows.iterrows():
        name = f"{row['method']}{'' if row['step'] == 'all' else f', step {row.step!r}'}"
        norm, cosine, energies = (_cell(row, n) for n in ("norm_ratio", "cosine", "cosine_from_energies"))
        along = f"cosine {cosine}, the energies alone give {energies}"
        if row["cosine_lower"] >= ALIKE:
            sentences.append(f"{name} here: {comparison.plain} with {norm} of its step, {along}.")
            continue
        turned = (
            f"another direction than {comparison.plain}'s" if row["cosine_upper"] < ALIKE else "direction undecided"
        )
        sentences.append(f"{name} here: {turned}, {along}; norm {norm} of {comparison.plain}'s.")
    return [*sentences, SCALE] if (rows["cosine_lower"] >= ALIKE).any() else sentences


def _cell(row: pd.Series, name: str) -> str:
    lower, upper = row[f"{name}_lower"], row[f"{name}_upper"]
    write = partial(digits, count=3)
    bounds = "" if write(lower) == write(upper) else in_brackets(lower, upper, write)  # 1 [1, 1] says no more than 1
    return f"{write(row[name])}{bounds}"


def _gains(rows: pd.DataFrame) -> list[str]:
    """Return the plain update's gain, then the other weightings' differences from it."""
    return _plain(rows[:1], "gain", digits) + _plain(rows[1:], "gain_difference", digits)


def _prompts(ratio: float) -> str:
    return f"{ceil(1 / ratio):,}"


def _design(c: Comparison) -> str:
    names = [*c.table["method"].unique()]
    return (
        f"{counted(len(names), 'weighting')} ({', '.join(names)}) on {counted(len(c.weights), 'token')} of "
        f"{counted(c.num_prompts, 'prompt')}, of which "
        f"{c.num_informative_prompts} have a gradient; each against plain {c.plain} ({c.aggregation})."
    )


def _same(c: Comparison) -> str:
    same = c.table[c.table["same_as"] != ""]
    groups = [f"{', '.join(own['method'])}: the same as {name}" for name, own in same.groupby("same_as", sort=False)]
    return "On this batch these weightings equal another up to rounding:\n" + "\n".join(groups) if groups else ""


def _numbers(c: Comparison) -> str:
    first = c.by_interval[c.by_interval["interval"] == 0].set_index(["method", "step"])
    shown = c.table[c.table["same_as"] == ""].set_index(["method", "step"])
    columns = {f"energy, π in {c.labels[0]}": _percent(first.reindex(shown.index), "energy_share")}
    names = {"norm": "norm_ratio", "cosine": "cosine", "from energies alone": "cosine_from_energies"}
    columns |= {words: _plain(shown, name) for words, name in names.items()}
    columns |= {"signal/noise": _plain(shown, "signal_to_noise", digits)}
    names = {"right_sgd": "right way, SGD", "right_adamw": "AdamW", "right_step": f"real {_optimizer(c)} steps"}
    columns |= {words: _percent(shown, name) for name, words in names.items() if name in shown}
    columns |= {"ΔH, nats": _plain(shown, "entropy_change", digits)} if "entropy_change" in shown else {}
    columns |= {"tokens that carry it": _percent(shown, "effective_share")}
    table = pd.DataFrame(columns, index=[" ".join(key).removesuffix(" all") for key in shown.index])
    return table.to_string()


def _optimizer(c: Comparison) -> str:
    return "SGD" if c.step is not None and c.step.optimizer == "sgd" else "AdamW"


def _percent(frame: pd.DataFrame, name: str) -> list[str]:
    return _cells(100 * frame[[f"{name}{end}" for end in ("", "_lower", "_upper")]], "{:.0f}".format, " %")


def _plain(frame: pd.DataFrame, name: str, write: Callable[[float], str] = "{:.2f}".format) -> list[str]:
    return _cells(frame[[f"{name}{end}" for end in ("", "_lower", "_upper")]], write, "")


def _cells(numbers: pd.DataFrame, write: Callable[[float], str], unit: str) -> list[str]:
    return [
        "–" if np.isnan(value) else f"{write(value)}{unit}{in_brackets(lower, upper, write)}".replace("-", "−")
        for value, lower, upper in numbers.to_numpy(np.float64)
    ]
