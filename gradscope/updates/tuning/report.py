"""What a screening of settings says, in words and two tables."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd

from gradscope.resampling import in_brackets
from gradscope.updates.tuning.screen import CELLS, ENOUGH_BATCHES, PAIRS, Screening

CAUTION = """No one has shown that this statistic predicts a run's final accuracy: it says which way one step moves the
tokens of these batches, no more. It can be a reason to try a setting; it is no result."""
FIRST_ORDER = """Predictions are first order: all gradients, also that of Lopti's second pass, are taken before the
first step, and AdamW's denominator is that of the plain step. Each batch is one mini-batch.
A setting with η takes two optimizer steps where plain takes one: under AdamW its momentum and decay act twice; a random
split of the same sizes (analyses.paper.fig3) is the control."""
NO_ETA = """η is not judged by the prediction here (no gradient is clipped, so to first order its two steps are
plain's one)"""


def report(screening: Screening, *, step: str) -> str:
    """The finding, how far to trust it, and the grid. step: the optimizer step, in words."""
    parts = [
        _design(screening, step),
        "\n".join(_finding(screening)),
        *([_others(screening)] if screening.rankings else []),
        f"{FIRST_ORDER}\n{CAUTION}",
        _grids(screening),
    ]
    return "\n\n".join(parts)


def _design(screening: Screening, step: str) -> str:
    out, prompts = screening.held_out, screening.prompts
    select, confirm = (", ".join(str(b) for b, held in enumerate(out) if held is wanted) for wanted in (False, True))
    sizes = f"{min(prompts)}" if len(set(prompts)) == 1 else f"{min(prompts)} to {max(prompts)}"
    return (
        f"{len(screening.settings)} settings, each one step ({step}), on {len(prompts)} batches of {sizes} prompts.\n"
        f"Selection: batch {select}. Held out, to confirm: batch {confirm}.\n"
        f"Score: the share of the tokens that a step moves the right way, averaged over {len(screening.cells)} of "
        f"{len(CELLS)} intervals of π_old × signs of Â,\n"
        f"those in which at least {screening.min_tokens} tokens moved in every batch under every setting: "
        f"{', '.join(screening.cells)}.\n"
        "Of equal scores the first counts: the plain loss, then off before any α or η, then other methods."
    )


def _finding(screening: Screening) -> list[str]:
    best, plain = screening.candidate, screening.settings.iloc[0]
    scores = f"{best['predicted_score']:.4f} against {plain['predicted_score']:.4f} of the plain loss"
    candidate = f"Candidate: {best['setting']}, of the best predicted score on the selection batches ({scores})"
    if best.name == plain.name:
        candidate = "Candidate: none: no setting's predicted score on the selection batches beats the plain loss's"
    lines = [f"{candidate}." if screening.eta_judged else f"{candidate};\n{NO_ETA}."]
    if not best["verdict"]:
        return [*lines, "Nothing confirms this: no actual update was made."]
    if best.name != plain.name:
        difference = f"{best['difference']:+.4f}{in_brackets(best['lower'], best['upper'], '{:+.4f}'.format)}"
        lines.append(f"On the held-out batches its actual score minus the plain loss's is {difference}:")
        lines.append(f"{best['verdict']}; {_answer(screening)}.")
    return [*lines, f"[{_interval(screening, 'held-out')}]"]


def _answer(screening: Screening) -> str:
    if screening.candidate["verdict"] == "undecided":
        return f"a verdict takes {ENOUGH_BATCHES} held-out batches, so give {2 * ENOUGH_BATCHES - 1} batches or more"
    return "it is worth a run" if screening.worth_a_run else "this gives no reason for a run"


def _interval(screening: Screening, role: Literal["selection", "held-out"]) -> str:
    """What the intervals on the batches of this role are."""
    count = screening.held_out.count(role == "held-out")
    batches = f"{count} {role} batch{'es' if count > 1 else ''}"
    method = f"a bootstrap over prompts within the {batches}, too few to tell how other updates vary"
    if count >= ENOUGH_BATCHES:
        method = f"Student's t over the {batches}"
    return f"{screening.confidence:.0%} interval: {method}"


def _others(screening: Screening) -> str:
    """The other settings, and how well the prediction ranks them."""
    rankings, enough = screening.rankings, sum(screening.held_out) >= ENOUGH_BATCHES
    method = "bootstrap over prompts within these batches; pulled towards 0"
    if enough:
        method = "mean of each held-out batch's, with Student's t over them"
    ranking = (
        f"Spearman correlation over the {len(screening.settings)} settings, with the actual scores on the held-out "
        f"batches: {rankings['selection']} of the scores\npredicted on the selection batches, "
        f"{rankings['held-out']} of those predicted on the same batches\n[{method}]."
    )
    return f"{_tally(screening)}\n{ranking}" if enough else ranking


def _tally(screening: Screening) -> str:
    """How many verdicts of each kind there are."""
    verdicts = screening.settings["verdict"].iloc[1:]
    counts = {name: int((verdicts == name).sum()) for name in ("better", "worse", "no difference")}
    by_chance = (1 - screening.confidence) * len(verdicts)
    return (
        f"All {len(verdicts)} settings against the plain loss: {counts['better']} better, {counts['worse']} worse, "
        f"{counts['no difference']} no difference.\n"
        f"They are compared one by one: if none differed, about {by_chance:.2g} of {len(verdicts)} would by chance."
    )


def _grids(screening: Screening) -> str:
    """Differences in percentage points; starred where the interval excludes 0."""
    grids, settings = [], screening.settings
    for kind, role, prefix in (("Predicted", "selection", "predicted_"), ("Actual", "held-out", "")):
        names = [f"{prefix}{name}" for name in ("difference", "lower", "upper")]
        if settings[names[0]].notna().any():
            title = f"{kind}, {role} batches: score minus the plain loss's, in percentage points"
            star = f"* 0 is outside the {_interval(screening, role)}"
            grids.append(f"{title}\n{_grid(settings, *names)}\n{star}")
    return "\n\n".join(grids)


def _grid(settings: pd.DataFrame, value: str, lower: str, upper: str) -> str:
    """α down, η across; then a line for every other method."""
    star = np.where((settings[lower] > 0) | (settings[upper] < 0), "*", " ")
    cells = pd.Series([f"{100 * v:+.2f}{s}" for v, s in zip(settings[value], star, strict=True)])
    other = settings["method"] != PAIRS
    width = settings["method"].str.len().max()
    lines = [f"{name:{width}}  {cell}" for name, cell in zip(settings["method"][other], cells[other], strict=True)]
    settings, cells = settings[~other], cells[~other]
    if len(settings) == 1:  # the plain loss alone
        return "\n".join(lines)
    rows = settings["alpha"].map(lambda a: "α off" if np.isnan(a) else f"α={a:g}")
    columns = settings["eta"].map(lambda e: "η off" if np.isnan(e) else f"η={e:g}")
    table = pd.DataFrame({"row": rows, "column": columns, "cell": cells}).pivot(
        index="row", columns="column", values="cell"
    )
    table = table.reindex(index=rows.unique(), columns=columns.unique())
    return "\n".join([table.rename_axis(index=None, columns=None).to_string(na_rep=""), *lines])
