"""How numbers are written in sentences."""

from __future__ import annotations

from math import isfinite, isnan

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def counted(number: int, noun: str) -> str:
    """Write a number of things, in the singular or the plural.

    >>> counted(1, "step"), counted(12_000, "token")
    ('1 step', '12,000 tokens')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def digits(value: float, count: int = 2) -> str:
    """Write `count` significant digits, and all before the point; below 10⁻⁵ and from 10⁷ on, with a power of ten.

    >>> [digits(value) for value in (34.6, 1.0, 0.0123, -6e-05, 1234.5, 3.04e-9, 0.0, float("nan"))]
    ['35', '1', '0.012', '−0.00006', '1,234', '3·10⁻⁹', '0', '–']
    """
    if not isfinite(value):
        return "–" if isnan(value) else f"{'−' if value < 0 else ''}∞"
    mantissa, exponent = f"{value:.{count - 1}e}".split("e")
    power = int(exponent)
    if value != 0 and not -5 <= power < 7:
        return f"{_trim(mantissa)}·10{str(power).translate(SUPERSCRIPTS)}".replace("-", "−")
    return _trim(f"{value:,.{max(0, count - 1 - power)}f}").replace("-", "−")


def _trim(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
