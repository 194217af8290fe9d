"""The headline at other sampling temperatures, where the log does not say which it was."""

from __future__ import annotations

import pandas as pd

from gradscope.diagnosis.format import as_sentence, share_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.rows import Rows, pick_row
from gradscope.diagnosis.shares import sum_by_prompt, token_shares
from gradscope.intervals import name_interval
from gradscope.rollouts import Note

TITLE = "Other temperatures"
ASKS = ("table",)


def rows(m: Measured) -> Rows:
    """temperatures: by temperature, the lowest interval's token_share and squared_share, with _lower and _upper.

    What they are is added to the note that the temperature is unknown, unless prompts are too few to say.
    """
    if "table" not in m.made:
        return Rows()
    seed, found = m.draws("temperatures")["seed"], []
    for temperature, table in m.made["table"].items():
        sums = sum_by_prompt(table, len(m.labels))
        shares = token_shares(sums, m.labels, seed=seed, resamples=m.settings.resamples)
        row: dict[str, float] = {"temperature": float(temperature)}
        for name, metric in (("token_share", "none"), ("squared_share", "raw")):
            known = pick_row(shares, name, metric, m.labels[0])
            row |= {name: known["value"], f"{name}_lower": known["lower"], f"{name}_upper": known["upper"]}
        found.append(row)
    tried = pd.DataFrame(found)
    place = next(place for place, note in enumerate(m.notes) if note.kind == "temperature")
    words = "" if m.supply.too_few else f" {describe(tried, m.labels[0])}"
    m.notes[place] = Note(f"{as_sentence(m.notes[place])}{words}", "temperature")
    return Rows(frames={"temperatures": tried}, unweighted=("temperatures",))


def describe(tried: pd.DataFrame, label: str) -> str:
    """Say what the lowest interval's share of the energy is at each temperature."""
    columns = {"squared_share": "value", "squared_share_lower": "lower", "squared_share_upper": "upper"}
    shares = tried[list(columns)].rename(columns=columns)
    pairs = zip(shares.iterrows(), tried["temperature"], strict=True)
    each = [f"{share_words(row)} at T = {temperature:g}" for (_, row), temperature in pairs]
    listed = f"{', '.join(each[:-1])} and {each[-1]}"
    return f"Tokens with {name_interval(label)} account for {listed} of the gradient energy."
