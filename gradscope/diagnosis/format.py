"""Numbers of a diagnosis as words: shares, bits and others, each with its bounds."""

from __future__ import annotations

from functools import partial
from math import isnan, log2

import pandas as pd

from gradscope.resampling import in_brackets
from gradscope.runs import digits
from gradscope.updates import StepSettings

VACUOUS = 0.9
"""How much of 0 to 1 a share's bounds allow from which on they say nothing of it."""
LEAST = 0.01
"""Lower bound of a share from which on even bounds far apart say something."""
SPREAD = 100.0
"""Ratio of a positive number's bounds from which on they say nothing of it."""
UNUSABLE = "[no usable bounds]"


def percent(value: float) -> str:
    """Write a share in percent, without the sign.

    >>> [percent(v) for v in (0.4793, 0.0139, 0.00021, -0.21, 1.0, 0.0)]
    ['48', '1.4', '0.021', '−21', '100', '0']
    """
    number = 100 * value
    if isnan(number):
        return "–"
    text = f"{number:.0f}" if abs(number) >= 9.95 or number == 0 else f"{number:.1f}"
    if 0 < abs(number) < 0.95:
        text = f"{number:.2g}" if abs(number) >= 1e-3 else "<0.001"
    return text.replace("-", "−")


def says_nothing(row: pd.Series, unit: str = "share") -> bool:
    """Return whether bounds allow almost everything. unit: share, bits or norm; others always say something.

    >>> [says_nothing(pd.Series({"lower": low, "upper": high})) for low, high in ((-10.33, 11.58), (-10.33, 0.47))]
    [True, False]
    """
    if unit == "share":
        return bool(min(row["upper"], 1.0) - max(row["lower"], 0.0) >= VACUOUS and row["lower"] < LEAST)
    if unit == "bits":
        return bool(row["upper"] - row["lower"] >= log2(SPREAD) and row["lower"] < 0 < row["upper"])
    return unit == "norm" and bool(row["upper"] >= SPREAD * row["lower"])


def drop_vacuous(rows: pd.DataFrame, unit: str = "share") -> pd.DataFrame:
    """Return rows without those bounds that say nothing, which sentences and tables leave out and no figure draws.

    unit: of rows without a column of that name.

    >>> drop_vacuous(pd.DataFrame({"value": [0.4, 0.4], "lower": [-0.2, 0.3], "upper": [1.2, 0.5]}))["upper"].tolist()
    [nan, 0.5]
    """
    units = rows["unit"] if "unit" in rows else [unit] * len(rows)
    vacuous = [says_nothing(row, own) for own, (_, row) in zip(units, rows.iterrows(), strict=True)]
    return rows.assign(**{end: rows[end].mask(vacuous) for end in ("lower", "upper")})


def share_words(row: pd.Series) -> str:
    """Write a share with its bounds, unless they say nothing.

    >>> share_words(pd.Series({"value": 0.48, "lower": 0.27, "upper": 0.64}))
    '48 % [27, 64]'
    >>> share_words(pd.Series({"value": 0.094, "lower": 0.00007, "upper": 0.99}))
    '9.4 % [no usable bounds]'
    """
    if isnan(row["value"]):
        return "–"
    if says_nothing(row):
        return f"{percent(row['value'])} % {UNUSABLE}"
    return share_bounds(row)


def share_bounds(row: pd.Series) -> str:
    """Write a share with its bounds, which decide something."""
    return f"{percent(row['value'])} %{in_brackets(row['lower'], row['upper'], percent)}"


def bits_words(row: pd.Series) -> str:
    """Write a signed number of bits with its bounds.

    >>> bits_words(pd.Series({"value": -0.6, "lower": -1.23, "upper": 0.16}))
    '−0.6 bits [−1.2, +0.2]'
    """
    bounds = f" {UNUSABLE}" if says_nothing(row, "bits") else in_brackets(row["lower"], row["upper"], "{:+.1f}".format)
    return f"{row['value']:+.1f} bits{bounds}".replace("-", "−")


def times_words(row: pd.Series) -> str:
    """Write bits, the log₂ of a ratio, as that ratio with its bounds, unless they say nothing.

    >>> times_words(pd.Series({"value": 4.75, "lower": 4.3, "upper": 5.1}))
    '27× [20, 34]'
    """
    if says_nothing(row, "bits"):
        return f"{times(row['value'])}× {UNUSABLE}"
    return f"{times(row['value'])}×{in_brackets(row['lower'], row['upper'], times)}"


def times(bits: float) -> str:
    """Write the ratio of which a number is log₂.

    >>> [times(bits) for bits in (4.75, -1.0, -21.0)]
    ['27', '0.5', '<0.001']
    """
    return "<0.001" if 2.0**bits < 1e-3 else digits(2.0**bits)


def step_words(step: StepSettings) -> str:
    return "AdamW" if step.optimizer == "adamw" else "SGD"


def number_words(row: pd.Series, significant: int | None = None) -> str:
    """Write a number with its bounds; a dash if it is NaN. significant: number of digits; None: two decimals.

    >>> number_words(pd.Series({"value": -0.00006, "lower": -0.0002, "upper": 0.0}), 2)
    '−0.00006 [−0.0002, 0]'
    """
    if isnan(row["value"]):
        return "–"
    write = "{:.2f}".format if significant is None else partial(digits, count=significant)
    return f"{write(row['value'])}{in_brackets(row['lower'], row['upper'], write)}".replace("-", "−")


def norm_words(row: pd.Series) -> str:
    """Write a norm with three digits and its bounds, unless they say nothing.

    >>> norm_words(pd.Series({"value": 21.0, "lower": 0.09, "upper": 5132.0}))
    '21 [no usable bounds]'
    """
    if says_nothing(row, "norm"):
        return f"{digits(row['value'], 3)} {UNUSABLE}"
    return number_words(row, 3)


def as_sentence(note: str) -> str:
    """Capitalise a note and end it with a full stop, unless it begins with a name."""
    first = note.split(" ", 1)[0]
    start = note[:1].upper() + note[1:] if first.isalpha() and first.islower() else note
    return start if start.endswith((".", "!", "?")) else f"{start}."
