"""Records that hold prompt and response as one sequence of ids, with a mask of the trained tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradscope.errors import InputError, show
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import MASKED_OUT, Row, need

OTHER_PARTS = (
    "tokens outside the policy gradient (cut off, or in another term of the loss, such as cross-entropy or "
    "distillation) are dropped"
)
WEIGHTED = "the trainer weights tokens in the policy gradient: each advantage is multiplied by its token's weight"


def split_sequence(
    record: Record,
    *,
    ids: str,
    mask: str,
    per_token: Mapping[str, str],
    columns: dict[str, Any],
    step: int | None,
    length: int | None = None,
    weights: str | None = None,
) -> Row:
    """Split a sequence into prompt and response, which starts at the first token kept by the mask.

    ids, mask: names of these columns. per_token: {native name: name in the file} of columns with a value per id; one
    that is all null is omitted. columns: further columns of the row. length: tokens before padding starts. weights:
    column with each token's weight in the policy gradient, 0 for tokens of other loss terms.
    """
    given = {name: need(record, name) for name in (ids, mask)}
    per_token = {**per_token, **({} if weights is None else {"weight": weights})}
    given |= {name: record.columns[name] for name in per_token.values() if name in record.columns}
    for name, values in given.items():
        if not isinstance(values, list):
            raise InputError(f"{record.place}: `{name}` is {show(values)}; give a list with one entry per token")
        if len(values) != len(given[ids]):
            raise InputError(
                f"{record.place}: `{name}` has {len(values)} entries for {len(given[ids])} tokens; give one each"
            )
    count = len(given[ids])
    end = count if length is None else length
    if length is not None and not 0 < length <= count:
        raise InputError(f"{record.place}: the length is {length} for {count} tokens; give 1 to {count}")
    kept, remarks = given[mask][:end], ()
    weight = given.get(weights, [])[:end]
    if any(value is not None for value in weight):
        own = [keep if value is None or value else 0 for keep, value in zip(kept, weight, strict=True)]
        remarks = (OTHER_PARTS,) if own != kept else ()
        kept = own
    if 1 not in kept:
        return Row(record.place, columns, step, left_out=MASKED_OUT)
    start = kept.index(1)
    row = {"prompt_ids": given[ids][:start], "response_ids": given[ids][start:end], "response_mask": kept[start:]}
    for native, name in per_token.items():
        values = given.get(name, [])[start:end]
        if any(value is not None for value in values):
            row[native] = values
    if "weight" in row:
        scale = [1.0 if value is None else value for value in row.pop("weight")]
        if "advantage" in row and any(keep and one != 1 for keep, one in zip(row["response_mask"], scale, strict=True)):
            row["advantage"] = _scaled(row["advantage"], scale)
            remarks += (WEIGHTED,)
    labels = {"prompt_ids": ids, "response_ids": ids, "response_mask": mask, **per_token}
    return Row(record.place, row | columns, step, labels, remarks=remarks)


def _scaled(values: list[Any], weights: list[Any]) -> list[Any]:
    """Multiply each value by its weight; non-numbers stay for the reader to report."""
    number = int | float
    return [
        v * w if isinstance(v, number) and isinstance(w, number) else v for v, w in zip(values, weights, strict=True)
    ]
