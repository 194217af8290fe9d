"""What a format is to the readers: columns that tell it from others, and how its records become rows."""

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
    "the log holds text: prompts and responses were tokenized again, which may not give the ids that were sampled"
)
FOUND_BY_TEXT = (
    "the log holds text: prompts were tokenized again, and responses' ids were found by the text of their tokens"
)
NO_SPECIAL_TOKENS = (
    "responses were decoded without special tokens: the end-of-sequence token that closed a response is not among its "
    "tokens"
)
AS_TEXT = (
    "the log has no ids of them: their messages were tokenized again, which may not give the ids that were sampled, "
    "nor the token that ended them"
)
ON_POLICY = Note("the rollouts hold no log-probabilities: taken as on-policy (ratio 1)", "on-policy")
NO_TEMPERATURE = Note(
    "the sampling temperature is not in the log and was taken as 1; give --temperature (in Python temperature=)",
    "temperature",
)
FROM_REWARDS = (
    "the rollouts hold no advantages: they are GRPO's from rewards within each prompt's responses, which is not what "
    "another algorithm or a filter made of them"
)
EMPTY = "the response is empty"
UNKNOWN = "the {} is not known (null, NaN or infinite)"
TORN = "the last line of its file was cut off while it was written"
RESIZED = "their text gives another number of tokens than the log counts"
MASKED_OUT = "the trainer's mask keeps no token of them"
MADE_AGAIN = "the run was resumed before their step, and made it again later in the log"
ROUTED = (
    "their log holds the experts that the sampler chose, which the trainer takes again where it replays routing: the "
    "measured pass chooses its own, so that log π and gradients may be of other experts"
)
IMAGES = "their prompts hold images, video or sound, for which ids alone stand here"
EVALUATED = "they are of an evaluation"


@dataclass(frozen=True)
class Row:
    """One response, in the columns of the native format and of EXTRAS."""

    place: str
    columns: dict[str, Any]
    step: int | None = None
    """Training step."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Column → its name in the file, for errors."""
    left_out: str | None = None
    """Why the row is left out; None: it is not. The `reward` and `group` of one that is left out still count in its
    group's mean and standard deviation, as they did for the trainer: give neither where they did not."""
    remarks: tuple[str, ...] = ()
    """Remarks on this response; a note counts the responses with each."""
    is_counted: bool = True
    """Whether its reward counts in its group; False for all but the last output of a session."""
    loss: Mapping[str, Any] | None = None
    """Settings of the loss that it was trained with, where its file says them."""
    length: int | None = None
    """Tokens of the response, where the log counts them; a remark says where its text gives another number."""

    def label(self, name: str) -> str:
        """Return the column's name in the file."""
        return self.labels.get(name, name)


@dataclass(frozen=True)
class ReadingOptions:
    """The user's options for reading a log; None: as the log says."""

    step: Collection[int] | None = None
    """The training steps whose responses are kept; None keeps all."""
    temperature: int | float | None = None
    """Sampling temperature of all responses, whatever the log says."""
    reward_key: str | None = None
    """Which entry is the reward, where a row's `reward` is a dictionary {name: number}."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Arguments of the chat template, for prompts that are chats; they beat a row's own `chat_template_kwargs`."""


EXTRAS = ("entropy", "logprobs", "clipped")
"""Columns of a Row, one value per response token, that only a Dump has; see there."""


@dataclass(frozen=True)
class Answers:
    """The questions put to every format, answered in a phrase each: a row of the table in docs/formats."""

    group: str
    """Which responses are of one group, and so of one prompt."""
    step: str
    """What the log's step counts, and from which number on; which one a checkpoint sampled says `Format.first_step`."""
    sampled: str
    """Which tokens count as sampled: the mask, tool output, an end-of-sequence token that nobody sampled."""
    logprobs: str
    """Whose log-probabilities the log holds, under which names, and at which temperature."""
    left_out: str
    """Which rows are left out beside empty ones, fully masked ones and those without an advantage (a reward)."""
    checked: str
    """The trainer's versions whose logs were read, how (made by its own code, or after its source), and when."""


@dataclass(frozen=True)
class Format:
    """A trainer's log format."""

    name: str
    needs: frozenset[str]
    """Columns of every record, which identify the format."""
    knows: str
    """Further columns that its trainer writes, separated by blanks; other columns are ignored, too."""
    rows: Callable[[Iterable[Record], Policy | None], Iterator[Row]]
    beside: tuple[frozenset[str], ...] = ()
    """Columns that identify other kinds of records in the same log."""
    notes: tuple[str, ...] = ()
    """Notes that apply to every log of this format."""
    ends_torn: bool = False
    """Whether the trainer's own loader reads up to a last line that was cut off, where others refuse it."""
    is_finished: Callable[[Path], bool] = lambda path: True
    """Whether the trainer has written the whole of this file."""
    first_step: int = 1
    """The number that the log gives to the step whose responses the checkpoint numbered 0 sampled; n sampled those of
    n + first_step. 0 where steps count from 0 and checkpoints how many were taken, 1 where both count alike."""
    keeps_single_rewards: bool = False
    """Whether the trainer's advantage of a response that is alone in its group is its raw reward (mean 0, standard
    deviation 1, as in verl); else it is 0. Only for logs without advantages."""
    answers: Answers | None = None
    """Of a format that is registered here; a reader of your own needs none."""


def row_by_row(make: Callable[[Record, Policy | None], Row]) -> Callable[..., Iterator[Row]]:
    """Implement `Format.rows` for a format with a record per response."""
    return lambda records, policy: (make(record, policy) for record in records)


def list_by_list(
    make: Callable[[Record, Policy | None], Row], needs: Sequence[str], takes: Sequence[str]
) -> Callable[..., Iterator[Row]]:
    """Implement `Format.rows` for a format whose records are dictionaries of lists with an entry per response.

    needs: columns that every record has; takes: those that are read too, where it has them.
    """

    def rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
        for record in records:
            for entry in entries(record, needs, takes):
                yield make(entry, policy)

    return rows


def entries(record: Record, needs: Sequence[str], takes: Sequence[str]) -> Iterator[Record]:
    """Split a record that is a dictionary of lists into records without nulls; see `list_by_list`."""
    for name in needs:
        if not isinstance(record.columns.get(name), list):
            raise InputError(f"{record.place}: `{name}` is no list; a line of this format is one list per column")
    length = len(record.columns[needs[0]])
    read = {name: record.columns[name] for name in (*needs, *takes) if name in record.columns}
    for name, value in read.items():
        if isinstance(value, list) and len(value) != length:
            raise InputError(
                f"{record.place}: `{name}` has {len(value)} entries, `{needs[0]}` {length}; each list has one per "
                "response"
            )
    for index in range(length):
        columns = {name: v[index] if isinstance(v, list) else v for name, v in read.items()}
        known = {name: v for name, v in columns.items() if v is not None}
        yield Record(record.path, f"{record.place}, entry {index}", known)


def pick(record: Record, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns that the record has: {native name: name in the file}."""
    return {native: record.columns[own] for native, own in names.items() if own in record.columns}


def numbers_beside(record: Record, known: Collection[str]) -> dict[str, Any]:
    """Return the record's numbers under other names than these, as the column `reward_parts`; nothing without."""
    parts = {name: v for name, v in record.columns.items() if name not in known and isinstance(v, int | float)}
    return {"reward_parts": parts} if parts else {}


def need(record: Record, name: str) -> Any:
    """Return the record's column of that name. Raises InputError if it is missing."""
    if name not in record.columns:
        raise InputError(f"{record.place}: no `{name}`; every record of this format has one; leave the record out")
    return record.columns[name]


def need_objects(record: Record, name: str) -> list[dict[str, Any]]:
    """Return the record's list of objects of that name. Raises InputError if it is missing, or none."""
    values = need(record, name)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InputError(f"{record.place}: `{name}` is {show(values)}; wanted is a list of objects")
    return values


def whole_number(record: Record, name: str) -> int | None:
    """Parse a count such as the training step; strings of digits and 3.0 are accepted. None if the record has none."""
    value = record.columns.get(name)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, float) and value.is_integer():  # a column of pandas with a hole
        value = int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63):
        return value
    raise InputError(f"{record.place}: `{name}` is {show(value)}; wanted is a whole number of 64 bits")
