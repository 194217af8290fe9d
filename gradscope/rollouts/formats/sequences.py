"""Records that hold prompt and response as one sequence of ids, with a mask of the tokens that were trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradscope.errors import InputError, show
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import MASKED_OUT, Row, need


def split_sequence(
    record: Record,
    *,
    ids: str,
    mask: str,
    per_token: Mapping[str, str],
    columns: dict[str, Any],
    step: int | None,
    length: int | None = None,
) -> Row:
    """The row of a sequence: its response starts at the first token that the mask keeps.

    ids, mask: names of these columns; per_token: {native name: name in the file} of columns as long as the ids, of
    which one without any value is not given; columns: what else is known; length: of the sequence, the rest is padding.
    """
    given = {name: need(record, name) for name in (ids, mask)}
    given |= {name: record.columns[name] for name in per_token.values() if name in record.columns}
    for name, values in given.items():
        if not isinstance(values, list):
            raise InputError(f"{record.place}: `{name}` is {show(values)}; wanted is a list, one entry per token")
        if len(values) != len(given[ids]):
            raise InputError(
                f"{record.place}: `{name}` has {len(values)} entries for {len(given[ids])} tokens; wanted is one each"
            )
    if length is not None and not 0 < length <= len(given[ids]):
        raise InputError(f"{record.place}: a length of {length} for {len(given[ids])} tokens; wanted is 1 to as many")
    end = len(given[ids]) if length is None else length
    kept = given[mask][:end]
    if 1 not in kept:
        return Row(record.place, columns, step, left_out=MASKED_OUT)
    start = kept.index(1)
    row = {"prompt_ids": given[ids][:start], "response_ids": given[ids][start:end], "response_mask": kept[start:]}
    for native, name in per_token.items():
        values = given.get(name, [])[start:end]
        if any(value is not None for value in values):
            row[native] = values
    labels = {"prompt_ids": ids, "response_ids": ids, "response_mask": mask, **per_token}
    return Row(record.place, row | columns, step, labels)
