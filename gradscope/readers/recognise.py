"""Which format a file is of, told by the columns of its first record."""

from __future__ import annotations

from collections.abc import Mapping

from gradscope.errors import InputError
from gradscope.readers.files import Record
from gradscope.readers.formats import Format
from gradscope.readers.native import count_columns, is_native


def recognise(record: Record, formats: Mapping[str, Format]) -> Format:
    """The format whose columns the record has; a record near the native one is native, whose reader says what lacks.

    Raises InputError that names the columns and the nearest format.
    """
    names = set(record.columns)
    if record.path.suffix == ".pt":
        return formats["slime"]
    if is_native(names):
        return formats["native"]
    fitting = [form for form in formats.values() if form.needs and form.needs <= names]
    if fitting:
        return max(fitting, key=lambda form: len(form.needs & names))
    common = {form.name: len(names & (form.needs | set(form.knows.split()))) for form in formats.values()}
    common["native"] = count_columns(names)
    nearest = max(formats.values(), key=lambda form: (common[form.name], form.name == "native"))
    if nearest.name == "native" and common["native"]:
        return nearest
    given = ", ".join(sorted(names)[:12]) or "none"
    if not common[nearest.name]:
        raise InputError(f"{record.place}: columns of no known format ({given}); known are {', '.join(formats)}")
    raise InputError(
        f"{record.place}: columns of no known format ({given}); the nearest is {nearest.name}, which also has "
        f"{', '.join(sorted(nearest.needs - names))}; give --format, or rename them to the native columns"
    )


def check_format(record: Record, form: Format) -> None:
    """InputError for a record that lacks a column of the format that was asked for."""
    if missing := sorted(form.needs - set(record.columns)):
        raise InputError(
            f"{record.place}: no `{missing[0]}`, which every record of the format {form.name} has; leave --format out, "
            "or give another"
        )
