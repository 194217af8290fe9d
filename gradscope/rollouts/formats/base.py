"""The interface of a format: the columns that identify it, and how its records become rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradscope.errors import InputError, show
from gradscope.rollouts.batch import Note
from gradscope.rollouts.files import Record

if TYPE_CHECKING:
    from gradscope.policy import Policy

RETOKENISED = (
    "the log holds text: prompts and responses were tokenized again, which may not reproduce the sampled ids"
)
FOUND_BY_TEXT = (
    "the log holds text: prompts were tokenized again, and responses' ids were found from the text of each token"
)
NO_SPECIAL_TOKENS = (
    "responses were decoded without special tokens: the end-of-sequence token that ended a response is not among its "
    "tokens"
)
AS_TEXT = (
    "the log has no ids for them: their messages were tokenized again, which may not reproduce the sampled ids or the "
    "token that ended them"
)
ON_POLICY = Note("the rollouts hold no log-probabilities: taken as on-policy (ratio 1)", "on-policy")
NO_TEMPERATURE = Note(
    "the sampling temperature is not in the log and was taken as 1; give --temperature (in Python temperature=)",
    "temperature",
)
FROM_REWARDS = (
    "the rollouts hold no advantages: GRPO's are computed from the rewards of each prompt's responses; another "
    "algorithm or filter may give others"
)
EMPTY = "the response is empty"
UNKNOWN = "the {} is unknown (null, NaN or infinite)"
TORN = "the last line of the file was cut off while being written"
RESIZED = "their text gives a different number of tokens than the log states"
MASKED_OUT = "the trainer's mask drops all of their tokens"
MADE_AGAIN = "the run was resumed from an earlier step, and their step is repeated later in the log"
ROUTED = (
    "the log holds the experts chosen by the sampler, which a trainer with routing replay reuses; the measured pass "
    "chooses its own, so log π and gradients may come from other experts"
)
IMAGES = "their prompts contain images, video or sound, which the log represents only by ids"
EVALUATED = "they are from an evaluation"


@dataclass(frozen=True)
class Row:
    """A response, with columns named as in the native format and EXTRAS."""

    place: str
    columns: dict[str, Any]
    step: int | None = None
    """Training step."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Column → its name in the file, for error messages."""
    left_out: str | None = None
    """Why the row is left out; None if it is not. If a left-out row has `reward` and `group`, its reward still counts
    in the group's mean and standard deviation; set neither if the trainer did not count it."""
    remarks: tuple[str, ...] = ()
    """Remarks on this response; notes count the responses with each remark."""
    is_counted: bool = True
    """Whether its reward counts in its group; False for all outputs of a session except the last."""
    loss: Mapping[str, Any] | None = None
    """Settings of the training loss, if its file records them."""
    length: int | None = None
    """Length of the response according to the log; a remark reports a different length of the text."""

    def label(self, name: str) -> str:
        """Return the column's name in the file."""
        return self.labels.get(name, name)


@dataclass(frozen=True)
class ReadingOptions:
    """The user's options for reading a log; None: according to the log."""

    step: Collection[int] | None = None
    """Training steps whose responses to keep; None: all."""
    temperature: int | float | None = None
    """Sampling temperature of all responses, overriding the log."""
    reward_key: str | None = None
    """Entry to use as the reward, if a row's `reward` is a dictionary {name: number}."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Arguments of the chat template, overriding a row's `chat_template_kwargs`."""


EXTRAS = ("entropy", "logprobs", "clipped")
"""Per-token columns of a Row that only a `Dump` keeps."""


@dataclass(frozen=True)
class Answers:
    """Facts about a format, a phrase each; they fill a row of the table in docs/formats."""

    group: str
    """Which responses form a group."""
    step: str
    """What the log's step counts, and its first value; see `Format.first_step` for the step of a checkpoint."""
    sampled: str
    """Which tokens count as sampled: the mask, tool output, an inserted end-of-sequence token."""
    logprobs: str
    """Whose log-probabilities the log holds, under which names, and at which temperature."""
    left_out: str
    """Which rows are left out, besides empty, fully masked and unrewarded ones."""
    checked: str
    """Versions tested, how their logs were made (by the trainer's code, or by a writer after its source), and when."""


@dataclass(frozen=True)
class Format:
    """A trainer's log format."""

    name: str
    needs: frozenset[str]
    """Columns of every record, which identify the format."""
    knows: str
    """Further columns written by the trainer, separated by blanks; ignored like all others."""
    rows: Callable[[Iterable[Record], Policy | None], Iterator[Row]]
    beside: tuple[frozenset[str], ...] = ()
    """Columns that identify other kinds of records in the log."""
    notes: tuple[str, ...] = ()
    """Notes that apply to every log of this format."""
    ends_torn: bool = False
    """Whether an incomplete last line is ignored, as by the trainer's loader, rather than refused."""
    is_finished: Callable[[Path], bool] = lambda path: True
    """Returns whether the trainer has finished writing a file."""
    first_step: int = 1
    """Number in the log of the step sampled by checkpoint 0; checkpoint n sampled step n + first_step. 0 if steps count
    from 0 and checkpoints are numbered by completed steps, 1 if both are numbered alike."""
    keeps_single_rewards: bool = False
    """Whether the advantage of a response alone in its group is its raw reward (mean 0, standard deviation 1, as in
    verl) instead of 0. Only for logs without advantages."""
    answers: Answers | None = None
    """Documentation of a registered format; not needed for your own reader."""


def row_by_row(make: Callable[[Record, Policy | None], Row]) -> Callable[..., Iterator[Row]]:
    """Make `Format.rows` for a format with one record per response."""
    return lambda records, policy: (make(record, policy) for record in records)


def list_by_list(
    make: Callable[[Record, Policy | None], Row], needs: Sequence[str], takes: Sequence[str]
) -> Callable[..., Iterator[Row]]:
    """Make `Format.rows` for records that are dictionaries of lists with an entry per response.

    needs: required columns; takes: optional columns.
    """

    def rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
        for record in records:
            for entry in entries(record, needs, takes):
                yield make(entry, policy)

    return rows


def entries(record: Record, needs: Sequence[str], takes: Sequence[str]) -> Iterator[Record]:
    """Split a dictionary of lists into records without nulls; see `list_by_list`."""
    for name in needs:
        if not isinstance(record.columns.get(name), list):
            raise InputError(f"{record.place}: `{name}` is not a list; a line of this format has one list per column")
    length = len(record.columns[needs[0]])
    read = {name: record.columns[name] for name in (*needs, *takes) if name in record.columns}
    for name, value in read.items():
        if isinstance(value, list) and len(value) != length:
            raise InputError(
                f"{record.place}: `{name}` has {len(value)} entries, `{needs[0]}` {length}; each list needs one per "
                "response"
            )
    for index in range(length):
        columns = {name: v[index] if isinstance(v, list) else v for name, v in read.items()}
        known = {name: v for name, v in columns.items() if v is not None}
        yield Record(record.path, f"{record.place}, entry {index}", known)


def pick(record: Record, names: Mapping[str, str]) -> dict[str, Any]:
    """Rename columns by {native name: name in the file}; those that the record lacks are skipped."""
    return {native: record.columns[own] for native, own in names.items() if own in record.columns}


def numbers_beside(record: Record, known: Collection[str]) -> dict[str, Any]:
    """Return {"reward_parts": the record's numeric columns outside `known`}; {} if there are none."""
    parts = {name: v for name, v in record.columns.items() if name not in known and isinstance(v, int | float)}
    return {"reward_parts": parts} if parts else {}


def need(record: Record, name: str) -> Any:
    """Return a required column. Raises InputError if it is missing."""
    if name not in record.columns:
        raise InputError(f"{record.place}: no `{name}`, which every record of this format has; leave the record out")
    return record.columns[name]


def need_objects(record: Record, name: str) -> list[dict[str, Any]]:
    """Return a required column that is a list of objects. Raises InputError otherwise."""
    values = need(record, name)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InputError(f"{record.place}: `{name}` is {show(values)}; give a list of objects")
    return values


def whole_number(record: Record, name: str) -> int | None:
    """Parse an integer such as the training step, also from strings of digits or 3.0; None if missing."""
    value = record.columns.get(name)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, float) and value.is_integer():  # from a pandas column with missing values
        value = int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63):
        return value
    raise InputError(f"{record.place}: `{name}` is {show(value)}; give a 64-bit integer")
