"""Rollout files of any trainer become a TokenBatch: one file here per format, registered by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from gradscope.errors import InputError, checked
from gradscope.policy import Policy, PolicyLike, checkpoint_step, load_policy
from gradscope.rollouts.batch import Note, TokenBatch
from gradscope.rollouts.caveats import count_served, find_caveats, replace_caveats
from gradscope.rollouts.checks import check_batch
from gradscope.rollouts.dump import Dump, choose_step, make_dump, select_checkpoint_step
from gradscope.rollouts.files import Record, list_files, named_steps, read_records
from gradscope.rollouts.formats.areal import AREAL
from gradscope.rollouts.formats.base import Format, ReadingOptions
from gradscope.rollouts.formats.ms_swift import MS_SWIFT
from gradscope.rollouts.formats.native import NATIVE, count_columns, is_native, write_rollouts
from gradscope.rollouts.formats.nemo_rl import NEMO_RL
from gradscope.rollouts.formats.open_instruct import OPEN_INSTRUCT
from gradscope.rollouts.formats.prime_rl import PRIME_RL
from gradscope.rollouts.formats.prime_rl_traces import PRIME_RL_TRACES
from gradscope.rollouts.formats.rl_logging_board import RL_LOGGING_BOARD
from gradscope.rollouts.formats.rllm import RLLM
from gradscope.rollouts.formats.roll import ROLL
from gradscope.rollouts.formats.skyrl import SKYRL
from gradscope.rollouts.formats.slime import SLIME
from gradscope.rollouts.formats.torchtitan import TORCHTITAN
from gradscope.rollouts.formats.trl import TRL
from gradscope.rollouts.formats.verifiers import VERIFIERS
from gradscope.rollouts.formats.verifiers_graph import VERIFIERS_GRAPH
from gradscope.rollouts.formats.verl import VERL
from gradscope.runs import parquet_values

READERS: dict[str, Format] = {
    form.name: form
    for form in (
        *(NATIVE, TRL, VERL, PRIME_RL, PRIME_RL_TRACES, NEMO_RL, OPEN_INSTRUCT, SLIME, MS_SWIFT, ROLL, VERIFIERS),
        *(VERIFIERS_GRAPH, SKYRL, TORCHTITAN, AREAL, RLLM, RL_LOGGING_BOARD),
    )
}
"""Reader of each format, by name; add an entry for a reader of your own."""

TOLD_BY_NAME = {".pt": SLIME, ".pkl": SKYRL}
"""Formats whose files are read whole, by the file name's ending."""

NATIVE_ALONE = frozenset({"response_ids", "old_logprobs"})
"""Columns that tell native rows from RLLoggingBoard's, which have a prompt and a response, too."""

READER = 3
"""Version of the readers, incremented whenever one of them reads a log differently."""

MOST_STEPS = 10
"""Most training steps that are read together where one has too few prompts."""

Step = int | Literal["own", "all"] | None
"""Which training step: this one; a checkpoint's own; all; None: its own, with earlier ones where that is too small."""


class ReadingKeywords(TypedDict, total=False):
    """Arguments of `read_dump` beside the step, as keywords."""

    format: str | None
    temperature: int | float | None
    reward_key: str | None
    chat_template_kwargs: Mapping[str, Any] | None


__all__ = [
    "READER", "READERS", "BatchLike", "Dump", "LogSteps", "Step", "list_steps", "read_checkpoint_dump",
    "read_dump", "read_inputs", "read_logged", "read_rollouts", "write_rollouts",
]  # fmt: skip

BatchLike = TokenBatch | str | Path
"""A batch, or the path that `read_rollouts` reads it from."""


def read_inputs(policy: PolicyLike, batch: BatchLike) -> tuple[Policy, TokenBatch]:
    """Return the policy and batch of a function's arguments: checked, and loaded where they are paths.

    A batch that was made by hand, and so has no notes yet, gets those of what its own numbers say against it.
    """
    return read_logged(policy, batch)[:2]


def read_logged(policy: PolicyLike, batch: BatchLike) -> tuple[Policy, TokenBatch, Mapping[str, Any]]:
    """Return `read_inputs` and the settings of the loss that the log says; none of a batch."""
    policy = policy if isinstance(policy, Policy) else load_policy(policy)
    if not isinstance(batch, TokenBatch):
        dump = _read_one(batch, policy)
        return policy, dump.batch, dump.loss or {}
    check_batch(policy, batch)
    if not batch.notes:
        batch = replace_caveats(batch, find_caveats(batch, stop_ids=policy.stop_ids, pad_ids=policy.pad_ids))
    return policy, batch, {}


@checked
def read_rollouts(
    path: str | Path,
    policy: PolicyLike | None = None,
    *,
    format: str | None = None,
    step: int | Literal["all"] | None = None,
    temperature: int | float | None = None,
    reward_key: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokenBatch:
    """Read rollouts into a TokenBatch; arguments are those of `read_dump`, and `notes` say what reading assumed.

    step: the training step whose responses are kept. InputError where the log holds several and none is given, for
    they were sampled by different policies: "all" takes them together all the same.
    """
    how = {"temperature": temperature, "reward_key": reward_key, "chat_template_kwargs": chat_template_kwargs}
    return _read_one(path, policy, step, format=format, **how).batch


def _read_one(
    path: str | Path, policy: PolicyLike | None, step: int | Literal["all"] | None = None, **how: Any
) -> Dump:
    """Read the responses of one training step, as `read_rollouts` says."""
    dump = read_dump(path, policy, step=None if step == "all" else step, **how)
    steps = [] if dump.steps is None else dump.steps.unique().tolist()
    if step is None and len(steps) > 1:
        raise InputError(
            f"{path} holds {len(steps)} training steps, {steps[0]} to {steps[-1]}, each sampled by a different "
            'checkpoint; give step=, one of them, or "all"'
        )
    if isinstance(step, int) and policy is not None:
        return select_checkpoint_step(dump, checkpoint_step(policy.path if isinstance(policy, Policy) else policy))
    return dump


@checked
def read_dump(
    path: str | Path,
    policy: PolicyLike | None = None,
    *,
    format: str | None = None,
    step: int | Collection[int] | None = None,
    temperature: int | float | None = None,
    reward_key: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Dump:
    """Read the responses of one file, or of all files of a folder in order, which must then be of one format.

    policy: whose tokenizer encodes rows of text, and whose vocabulary and context bound the ids; without one, rows
        must hold ids and their size is not checked.
    format: a name in READERS; None tells it by the columns of each file's first record.
    step: keeps the responses of one training step, or of these; None keeps all.
    temperature: that all responses were sampled at; None: what the log says of each, else 1.0.
    reward_key: which entry is the reward, where the log's are dictionaries.
    chat_template_kwargs: arguments of the chat template, such as {"enable_thinking": False}, for prompts that are
        chats; they beat those of a row's own column of that name.

    Rows that hold no response, or none of whose tokens was trained, and those whose advantage is unknown where others'
    is known (without any, whose reward is), are left out, and a note says how many. Raises InputError, naming file and
    row, for anything that cannot be used, and for a step that is not there, naming those that are.
    """
    path, policy = Path(path), load_policy(policy) if isinstance(policy, str | Path) else policy
    steps = (step,) if isinstance(step, int) else step
    options = ReadingOptions(steps, temperature, reward_key, chat_template_kwargs)
    if temperature is not None and not 0 < temperature < float("inf"):
        raise InputError(f"temperature is {temperature}; give a positive number")
    form, files, unfinished = _open(path, format)
    if steps is not None:
        files = {f: named for f, named in files.items() if _only_step(form, f) in (None, *steps)} or files
    notes = [*form.notes] + ([f"{unfinished} unfinished files left out (no marker STABLE)"] if unfinished else [])
    rows = form.rows(_records(form, files), policy)
    return make_dump(rows, policy, form, path=path, options=options, notes=notes, is_dump=form is not NATIVE)


@dataclass(frozen=True)
class LogSteps:
    """Which training steps a log holds, as it counts."""

    known: tuple[int, ...]
    """Ascending, without steps all of whose rows the format leaves out; empty where the rows name none."""
    first_step: int
    """As `Dump.first_step`."""
    unfinished: int = 0
    """Files that the trainer has not finished, which are left out."""

    def of_checkpoint(self, checkpoint: int) -> int:
        """Return the number of the step that a checkpoint sampled, whether the log holds it or not."""
        return checkpoint + self.first_step


def list_steps(path: Path, *, format: str | None = None) -> LogSteps:
    """List a log's training steps; nothing is tokenized. Raises what `read_dump` raises where it cannot be read."""
    form, files, unfinished = _open(path, format)
    told = {file: _only_step(form, file) for file in files}
    unknown = {file: named for file, named in files.items() if told[file] is None}
    steps = {row.step for row in form.rows(_records(form, unknown), None) if row.left_out is None} | {*told.values()}
    return LogSteps(tuple(sorted(step for step in steps if step is not None)), form.first_step, unfinished)


def read_checkpoint_dump(
    path: Path,
    policy: Policy,
    checkpoint: int | None,
    *,
    step: Step = None,
    prompts: int = 0,
    **how: Unpack[ReadingKeywords],
) -> Dump:
    """Read the responses that a checkpoint sampled, as `select_checkpoint_step` selects them.

    Only those are tokenized and batched, so neither the length of a log nor what it grows by changes them.
    checkpoint: how many steps it had taken. step: take that one instead, or all. prompts: where fewer of the
    checkpoint's own have an advantage, and no step is given, those of as many earlier steps are read with them as it
    takes, at most MOST_STEPS; a note of the kind "pooled" says so. how: other arguments of `read_dump`.
    """
    if step == "all":
        return read_dump(path, policy, **how)
    if step in (None, "own") and checkpoint is not None:
        steps = list_steps(path, format=how.get("format"))
        if len(steps.known) > 1:
            own, note = choose_step(steps.known, steps.of_checkpoint(checkpoint))
            dump = read_dump(path, policy, step=own, **how).with_note(note, note.kind)
            earlier = [] if step == "own" else [known for known in steps.known if known < own][1 - MOST_STEPS :]
            return _pool(dump, earlier, prompts, lambda chosen: read_dump(path, policy, step=chosen, **how), note)
    own = step if isinstance(step, int) else None
    return select_checkpoint_step(read_dump(path, policy, step=own, **how), checkpoint)


def _pool(dump: Dump, earlier: list[int], prompts: int, read: Callable[[list[int]], Dump], note: Note) -> Dump:
    """Add earlier steps, the latest first, until so many prompts have an advantage. note: which step the dump is of."""
    [own], alone = dump.steps.unique().tolist(), count_served(dump.batch)
    if alone >= prompts or not earlier:
        return dump
    batch = read([*earlier, own]).batch
    served = (first for first in reversed(earlier) if count_served(batch[batch.steps >= first]) >= prompts)
    first = next(served, earlier[0])
    chosen = [step for step in earlier if step >= first]
    taken = f"step {first} is" if len(chosen) == 1 else f"steps {first} to {chosen[-1]} are"
    few = f"{alone} prompt{' has' if alone == 1 else 's have'} an advantage and {prompts} are wanted"
    words = f"{taken} taken with step {own}, of which {few} (--step own takes it alone)"
    return read([*chosen, own]).with_note(note, note.kind).with_note(words, "pooled")


def _open(path: Path, name: str | None) -> tuple[Format, dict[Path, int | None], int]:
    """Return the format of a log's files, those that are finished, with the step that each is named after, and how many
    are not.
    """
    if name is not None and name not in READERS:
        raise InputError(f"rollout format {name!r} is not known; use one of {', '.join(sorted(READERS))}")
    files = list_files(path)
    form = _find_format(path, files, name)
    finished = [file for file in files if form.is_finished(file)]
    if not finished:
        raise InputError(
            f"{files[0]} has no marker STABLE beside it: {form.name} has not finished writing it; wait for it, or give "
            "another step's folder"
        )
    named = named_steps(finished)
    return form, {file: named.get(file) for file in finished}, len(files) - len(finished)


def _records(form: Format, files: Mapping[Path, int | None]) -> Iterator[Record]:
    return (r for file, step in files.items() for r in read_records(file, torn=form.ends_torn, step=step))


def _only_step(form: Format, file: Path) -> int | None:
    """Return the training step of all rows of a native parquet file, if its statistics tell it; no row is read."""
    known = parquet_values(file, "step") if form is NATIVE and file.suffix == ".parquet" else None
    return next(iter(known)) if known is not None and len(known) == 1 and {*map(type, known)} == {int} else None


def _find_format(path: Path, files: list[Path], name: str | None) -> Format:
    """Return the format common to all files that hold a record."""
    found: tuple[Path, Format] | None = None
    for file in files:
        record = next(_first(file), None)
        if record is None or record.torn:
            continue
        if name is None:
            form = recognise(record, READERS)
        else:
            form = READERS[name]
            check_format(record, form)
        if found is not None and form is not found[1]:
            raise InputError(
                f"{path} mixes formats: {found[0]} is {found[1].name}, {file} is {form.name}; give one of them, or a "
                "folder of one format"
            )
        found = found or (file, form)
    if found is None:
        for _ in chain.from_iterable(map(read_records, files)):
            pass  # says what is wrong with a line that is cut off
        raise InputError(f"{path} holds no rows; give at least one response")
    return found[1]


def _first(file: Path) -> Iterator[Record]:
    """Return at most one record; a file of tensors, which would be read whole, is recognised by its name."""
    if file.suffix in TOLD_BY_NAME:
        yield Record(file, str(file), dict.fromkeys(TOLD_BY_NAME[file.suffix].needs))
    else:
        yield from read_records(file, torn=True)


def recognise(record: Record, formats: Mapping[str, Format]) -> Format:
    """Return the format whose columns the record has; near misses of native rows count as native, whose reader reports
    them.

    Raises InputError that names the columns and the nearest format.
    """
    names = set(record.columns)
    if record.path.suffix in TOLD_BY_NAME:
        return formats[TOLD_BY_NAME[record.path.suffix].name]
    if is_native(names) and (names & NATIVE_ALONE or not RL_LOGGING_BOARD.needs <= names):
        return formats["native"]
    fitting = [form for form in formats.values() if form.needs and form.needs <= names]
    # A first row may lack the value of a column that the others have.
    fitting = fitting or [form for form in formats.values() if form.needs and form.needs <= names | record.nulls]
    fitting = fitting or [form for form in formats.values() if any(own <= names for own in form.beside)]
    if fitting:
        return max(fitting, key=lambda form: len(form.needs & names))
    common = {form.name: len(names & (form.needs | set(form.knows.split()))) for form in formats.values()}
    common["native"] = count_columns(names)
    nearest = max(formats.values(), key=lambda form: (common[form.name], form.name == "native"))
    if nearest.name == "native" and common["native"]:
        return nearest
    given = ", ".join(name[:40] for name in sorted(names)[:12]) or "none"
    if not common[nearest.name]:
        raise InputError(f"{record.place}: columns of no known format ({given}); known are {', '.join(formats)}")
    raise InputError(
        f"{record.place}: columns of no known format ({given}); the nearest is {nearest.name}, which also has "
        f"{', '.join(sorted(nearest.needs - names))}; give --format, or rename them to the native columns"
    )


def check_format(record: Record, form: Format) -> None:
    """Raise InputError if a record lacks a column of the requested format."""
    missing = sorted(form.needs - record.columns.keys() - record.nulls)
    if missing and not any(own <= set(record.columns) for own in form.beside):
        raise InputError(
            f"{record.place}: no `{missing[0]}`, which every record of the format {form.name} has; leave --format out, "
            "or give another"
        )
