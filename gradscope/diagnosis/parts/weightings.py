"""What each token weighting would change on this batch: `updates.compare`'s result."""

from __future__ import annotations

from dataclasses import replace

from gradscope import plots
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block, Paragraph
from gradscope.diagnosis.page.sheets import OVER_PROMPTS, Sheets, csv, redraw
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows
from gradscope.updates import ONE_BATCH, WHAT_STAYS, gain_sentence, signal_sentence, weighting_sentences

TITLE = "What each weighting would change"
ASKS = ("comparison",)


def rows(m: Measured) -> Rows:
    """weightings and weightings_by_interval: the tables of a `Comparison`."""
    made = m.made["comparison"]
    return Rows(frames={"weightings": made.table, "weightings_by_interval": made.by_interval}, kept={"made": made})


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    table, by_interval = found.frames["weightings"], found.frames["weightings_by_interval"]
    c = replace(found.rows["weightings"].kept["made"], table=table, by_interval=by_interval)
    caption = (
        f"Each token weighting against the baseline, plain {c.plain}, policy term only: share of the gradient energy "
        "by interval; norm of the summed gradient and its cosine with the baseline's, beside the cosine that the "
        "tokens' energies alone would give; signal to noise of one prompt; share of the tokens "
        "that one step moves in the direction of their advantage, to first order; share of tokens that carry it."
    )
    shown = ["method", "step", "same_as", "norm_ratio", "cosine", "cosine_from_energies", "signal_to_noise"]
    shown += ["right_sgd", "right_adamw", "entropy_change", "effective_share", "zero_share", "gain", "gain_difference"]
    same = "" if not (table["same_as"] != "").any() else " Same as: its weights are those of that row."
    read = [f'{csv(name)}.fillna({{"same_as": ""}})' for name in ("weightings", "weightings_by_interval")]
    again = redraw(plots.plot_comparison, *read, repr([*c.labels]))
    draw = lambda: plots.plot_comparison(table, by_interval, c.labels)  # noqa: E731
    return [
        sheets.figure("weightings_drawn", draw, caption, again=again, bars=OVER_PROMPTS),
        *map(Paragraph, weighting_sentences(c)),
        Paragraph(signal_sentence(c)),
        *(Paragraph(part) for part in gain_sentence(c).split("\n", 1) if part),  # the numbers, then their record
        *(Paragraph(note) for note in c.notes if note.kind != "off-policy"),
        sheets.table("weightings", table, f"The same in numbers.{same}", shown, folded=True),
        sheets.table("weightings_by_interval", by_interval, "Each weighting by probability interval.", folded=True),
        Paragraph(f"{WHAT_STAYS} {ONE_BATCH}"),
    ]
