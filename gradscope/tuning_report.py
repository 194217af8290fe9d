"""What a screening of α and η says, in words and two tables."""

from __future__ import annotations

import numpy as np
import pandas as pd

from gradscope.tuning_screen import CELLS, ENOUGH_BATCHES, Screening

CAUTION = """No one has shown that this statistic predicts a run's final accuracy: it says which way one step moves the
tokens of these batches, no more. It can be a reason to try a setting; it is no result."""
FIRST_ORDER = """Predictions are first order: all gradients, also that of Lopti's second pass, are taken before the
first step, and AdamW's denominator is that of the plain step. So under SGD, where no gradient is clipped,
Lopti's two passes add up to one, and η has no effect. Each batch is one mini-batch."""


def report(screening: Screening, *, step: str, notes: tuple[str, ...] = ()) -> str:
    """The finding, how far to trust it, and the grid. step: the optimizer step, in words; notes: more lines for it."""
    parts = [
        "\n".join([_design(screening, step), *notes]),
        "\n".join(_finding(screening)),
        *([_others(screening)] if screening.rankings else []),
        f"{FIRST_ORDER}\n{CAUTION}",
        _grids(screening.settings),
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
        f"{', '.join(screening.cells)}."
    )


def _finding(screening: Screening) -> list[str]:
    best, plain = screening.candidate, screening.settings.iloc[0]
    scores = f"{best['predicted_score']:.4f} against {plain['predicted_score']:.4f} of the plain loss"
    lines = [f"Candidate: {best['setting']}, of the best predicted score on the selection batches ({scores})."]
    if best.name == plain.name:
        lines = ["Candidate: none. No setting's predicted score on the selection batches beats the plain loss's."]
    if not best["verdict"]:
        return [*lines, "Nothing confirms this: no actual update was made."]
    if best.name != plain.name:
        answer = "it is worth a run" if screening.worth_a_run else "this gives no reason for a run"
        difference = f"{best['difference']:+.4f} [{best['lower']:+.4f}, {best['upper']:+.4f}]"
        lines.append(f"On the held-out batches its actual score minus the plain loss's is {difference}:")
        lines.append(f"{best['verdict']}; {answer}.")
    return [*lines, f"[{screening.confidence:.0%} intervals: {_method(screening)}]"]


def _method(screening: Screening) -> str:
    count = sum(screening.held_out)
    if count >= ENOUGH_BATCHES:
        return f"Student's t over the {count} held-out batches"
    few = f"{count} held-out batch{'es' if count > 1 else ''}"
    return f"a bootstrap over the prompts within the {few}, too few to tell how other updates vary"


def _others(screening: Screening) -> str:
    """The other settings, and how well the prediction ranks them."""
    verdicts = screening.settings["verdict"].iloc[1:]
    counts = {name: int((verdicts == name).sum()) for name in ("better", "worse", "no difference")}
    by_chance = (1 - screening.confidence) * len(verdicts)
    rankings = screening.rankings
    return (
        f"All {len(verdicts)} settings against the plain loss: {counts['better']} better, {counts['worse']} worse, "
        f"{counts['no difference']} no difference.\n"
        f"They are compared one by one: if none differed, about {by_chance:.2g} of {len(verdicts)} would by chance.\n"
        f"Spearman correlation over the {len(verdicts) + 1} settings, with the actual scores on the held-out batches: "
        f"{rankings['selection']} of the scores\npredicted on the selection batches, {rankings['held-out']} of those "
        "predicted on the same batches [bootstrap over prompts]."
    )


def _grids(settings: pd.DataFrame) -> str:
    """Differences in percentage points, α down and η across; starred where the interval excludes 0."""
    grids = []
    for title, prefix in (("Predicted, selection batches", "predicted_"), ("Actual, held-out batches", "")):
        names = [f"{prefix}{name}" for name in ("difference", "lower", "upper")]
        if settings[names[0]].notna().any():
            grids.append(f"{title}: score minus the plain loss's, in percentage points\n{_grid(settings, *names)}")
    return "\n\n".join(grids) + "\n* the interval excludes 0"


def _grid(settings: pd.DataFrame, value: str, lower: str, upper: str) -> str:
    star = np.where((settings[lower] > 0) | (settings[upper] < 0), "*", " ")
    cells = [f"{100 * v:+.2f}{s}" for v, s in zip(settings[value], star, strict=True)]
    rows = settings["alpha"].map(lambda a: "α off" if np.isnan(a) else f"α={a:g}")
    columns = settings["eta"].map(lambda e: "η off" if np.isnan(e) else f"η={e:g}")
    table = pd.DataFrame({"row": rows, "column": columns, "cell": cells}).pivot(
        index="row", columns="column", values="cell"
    )
    table = table.reindex(index=rows.unique(), columns=columns.unique())
    return table.rename_axis(index=None, columns=None).to_string(na_rep="")
