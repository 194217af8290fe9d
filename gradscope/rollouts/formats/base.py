"""What a format is: its columns as data, and what is odd about it; `columns` reads any of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradscope.errors import InputError, show
from gradscope.rollouts.batch import Note
from gradscope.rollouts.files import Record

if TYPE_CHECKING:
    from gradscope.policy import Policy

RETOKENISED = "the log holds text: prompts and responses were tokenized again, which may not reproduce the sampled ids"
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
FILLED_UP = "they are padding of the trainer's batch, not samples"


@dataclass(frozen=True)
class Column:
    """A column of a format: its native name, and where it stands in a record.

    Of several columns of one name, the first that a record has counts. Their kinds follow from their names: `prompt`
    and `response` are text or chats, `step` is a whole number. `ids` and `mask` hold prompt and response as one
    sequence, in which the response starts at the first token that the mask keeps; other columns with an entry per
    token are cut alike, `weight` is a token's weight in the policy gradient, and `distilled` in a distillation.
    """

    name: str
    path: str = ""
    """Name in the file; `a.b` is `b` in the object (or its JSON) `a`. Empty: the native name."""
    required: bool = False
    """Whether every record has it. These columns identify the format."""
    kind: str = ""
    """Empty: by the name. "chat": the column holds chats, which may be JSON."""

    @property
    def place(self) -> str:
        """The path."""
        return self.path or self.name


def required(**paths: str) -> tuple[Column, ...]:
    """Return columns that every record has, given as native name = path."""
    return tuple(Column(name, path, required=True) for name, path in paths.items())


def optional(**paths: str) -> tuple[Column, ...]:
    """Return columns that a record may have, given as native name = path."""
    return tuple(Column(name, path) for name, path in paths.items())


@dataclass(frozen=True)
class Row:
    """A response, with columns named as in the native format."""

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
    path: Path | None = None
    """Its file."""
    encode: Callable[[Policy, dict[str, Any]], dict[str, Any]] | None = None
    """Returns further columns, given the chat template's arguments, for a row whose ids are made of prompt and response
    together; "remarks", if among them, are further remarks."""

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


@dataclass(frozen=True)
class Format:
    """A log format: its columns, and what is odd about it."""

    name: str
    columns: tuple[Column, ...]
    """Columns that are read; all others are ignored."""
    rows: Callable[[Iterable[Record], Policy | None], Iterator[Row]] | None = None
    """Makes the rows, for a format that a list of columns does not describe; None: `columns.read_rows`."""
    is_lists: bool = False
    """Whether a record is a dictionary of lists with an entry per response."""
    has_parts: bool = False
    """Whether other numbers in a record, under any name, are parts of the reward."""
    opens_turn: bool = True
    """Whether the trainer opens an assistant's turn after a chat that ends with one; if not, the turn goes on."""
    beside: tuple[frozenset[str], ...] = ()
    """Columns that identify other kinds of records in the log."""
    suffix: str | None = None
    """Suffix that identifies the format's files, which can only be read whole."""
    read: Callable[[Path], Iterator[tuple[str, dict[str, Any]]]] | None = None
    """Reads such a file: each record's place and columns."""
    step_in: str | None = None
    """Pattern whose first group is the training step in a file's name; None: a column has it."""
    left_out: tuple[tuple[str, Callable[[Record], Any]], ...] = ()
    """Reasons to leave a record out, and whether one holds for it; the first that does counts."""
    remarks: tuple[tuple[str, Callable[[Record], Any]], ...] = ()
    """Remarks on a record's row, and whether one holds for it."""
    notes: tuple[str, ...] = ()
    """Notes that apply to every log of this format."""
    is_finished: Callable[[Path], bool] = lambda path: True
    """Returns whether the trainer has finished writing a file."""
    loss: Mapping[str, Any] | None = None
    """Settings of the loss that such data is for, which counts where neither a file nor the user names one."""
    distilled: Mapping[str, Any] | None = None
    """Settings of the loss of sequences that have no policy gradient, but `distilled` weights."""
    unlike: frozenset[str] = frozenset()
    """Columns that tell another kind of file: a record that has one is not told by `beside`."""
    settings: type | None = None
    """Dataclass of settings that the user may give: `--format NAME:key=value,…`."""
    make: Callable[..., Format] | None = None
    """Makes the format with such settings."""
    first_step: int = 1
    """Number in the log of the step sampled by checkpoint 0; checkpoint n sampled step n + first_step. 0 if steps count
    from 0 and checkpoints are numbered by completed steps, 1 if both are numbered alike."""
    keeps_single_rewards: bool = False
    """Whether the advantage of a response alone in its group is its raw reward (mean 0, standard deviation 1, as in
    verl) instead of 0. Only for logs without advantages."""

    @property
    def places(self) -> frozenset[str]:
        """Names of all columns, at the top of a record."""
        return frozenset(column.place.split(".")[0] for column in self.columns)

    def whose_loss(self, loss: Mapping[str, Any]) -> str:
        """Say whose these settings of the loss are: the file's, or those that such data is for."""
        if loss is not self.loss:
            return "the log records the training loss"
        return f"the loss is taken to be the one that a dataset of {self.name} is for (--weighting names another)"

    @property
    def needs(self) -> frozenset[str]:
        """Names of the required columns, which identify the format."""
        return frozenset(column.place.split(".")[0] for column in self.columns if column.required)


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
