"""Read any trainer's rollout files into a TokenBatch; formats are registered by name, one module each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
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
from gradscope.rollouts.trained_run import read_run
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
"""Formats identified by file suffix, whose files can only be read whole."""

NATIVE_ALONE = frozenset({"response_ids", "old_logprobs"})
"""Columns that distinguish native rows from RLLoggingBoard's, which also have a prompt and a response."""

READER = 3
"""Version of the readers; increment it when any reader's output changes."""

MOST_STEPS = 10
"""Maximum number of training steps read together if one has too few prompts."""

Step = int | Literal["own", "all"] | None
"""Training step to read: its number, "own" (the checkpoint's) or "all". None: "own", plus earlier ones if needed."""


class ReadingKeywords(TypedDict, total=False):
    """Keyword arguments of `read_dump` other than the step."""

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
    """Return a checked policy and batch, loaded if given as paths; a batch built by hand gets its caveats."""
    return read_logged(policy, batch)[:2]


def read_logged(policy: PolicyLike, batch: BatchLike) -> tuple[Policy, TokenBatch, Mapping[str, Any]]:
    """Return `read_inputs` and the loss settings recorded in the log; these are empty if `batch` is a TokenBatch."""
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
    """Read rollouts into a TokenBatch whose `notes` list what reading assumed; for the arguments see `read_dump`.

    step: training step whose responses to keep, or "all". Steps were sampled by different policies, so if the log
    holds several and `step` is None, InputError is raised.
    """
    how = {"temperature": temperature, "reward_key": reward_key, "chat_template_kwargs": chat_template_kwargs}
    return _read_one(path, policy, step, format=format, **how).batch


def _read_one(
    path: str | Path, policy: PolicyLike | None, step: int | Literal["all"] | None = None, **how: Any
) -> Dump:
    """Read the responses of one training step; see `read_rollouts`."""
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
    """Read the responses in a file, or in all files of a folder in order, which must share one format.

    policy: its tokenizer encodes text, and its vocabulary and context length bound the ids. Without a policy, rows must
        hold ids, whose range is not checked.
    format: name in READERS; None detects it from the columns of each file's first record.
    step: training step, or steps, whose responses to keep; None keeps all.
    temperature: sampling temperature of all responses; None takes each response's from the log, else 1.0.
    reward_key: entry to use as the reward, if the log's rewards are dictionaries.
    chat_template_kwargs: arguments of the chat template, such as {"enable_thinking": False}, for prompts that are
        chats; they override a row's column of the same name.

    Rows are left out, and counted in a note, if they have no response or no trained token, or if their advantage is
    unknown while others' are known (the same goes for rewards if no row has an advantage). Raises InputError, with file
    and row, for unusable input, and for a missing step, with the steps that the log holds.
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
    dump = make_dump(rows, policy, form, path=path, options=options, notes=notes, is_dump=form is not NATIVE)
    return replace(dump, batch=replace(dump.batch, run=read_run(files)))


@dataclass(frozen=True)
class LogSteps:
    """The training steps in a log, by the log's own numbers."""

    known: tuple[int, ...]
    """Step numbers in ascending order, without steps whose rows are all left out; empty if rows have no step."""
    first_step: int
    """See `Dump.first_step`."""
    unfinished: int = 0
    """Number of files left out because the trainer has not finished writing them."""

    def of_checkpoint(self, checkpoint: int) -> int:
        """Return the number of the step that a checkpoint sampled, even if it is not in the log."""
        return checkpoint + self.first_step


def list_steps(path: Path, *, format: str | None = None) -> LogSteps:
    """List a log's training steps without tokenizing. Raises the same errors as `read_dump`."""
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
    """Read the responses that a checkpoint sampled; see `select_checkpoint_step`.

    Only these are tokenized and batched, so other steps in the log, or added to it later, do not change them.

    Args:
        checkpoint: number of training steps that the checkpoint had taken.
        step: step to read instead, or "all".
        prompts: if `step` is None and fewer prompts than this have an advantage, earlier steps are added until enough
            do, up to MOST_STEPS in total, with a note of kind "pooled".
        how: other arguments of `read_dump`.
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
    """Add earlier steps, latest first, until `prompts` prompts have an advantage. note: names the dump's step."""
    [own], alone = dump.steps.unique().tolist(), count_served(dump.batch)
    if alone >= prompts or not earlier:
        return dump
    batch = read([*earlier, own]).batch
    served = (first for first in reversed(earlier) if count_served(batch[batch.steps >= first]) >= prompts)
    first = next(served, earlier[0])
    chosen = [step for step in earlier if step >= first]
    taken = f"step {first} is" if len(chosen) == 1 else f"steps {first} to {chosen[-1]} are"
    few = f"{alone} prompt{' has' if alone == 1 else 's have'} an advantage, fewer than {prompts}"
    words = f"{taken} added to step {own}, in which {few} (--step own uses step {own} alone)"
    return read([*chosen, own]).with_note(note, note.kind).with_note(words, "pooled")


def _open(path: Path, name: str | None) -> tuple[Format, dict[Path, int | None], int]:
    """Return a log's format, its finished files with the step in each name, and the number of unfinished files."""
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
    """Return the training step shared by all rows of a native parquet file, from its statistics, if they have it."""
    known = parquet_values(file, "step") if form is NATIVE and file.suffix == ".parquet" else None
    return next(iter(known)) if known is not None and len(known) == 1 and {*map(type, known)} == {int} else None


def _find_format(path: Path, files: list[Path], name: str | None) -> Format:
    """Return the format shared by all files that hold a record."""
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
            pass  # raises the error for a truncated line, if there is one
        raise InputError(f"{path} holds no rows; give at least one response")
    return found[1]


def _first(file: Path) -> Iterator[Record]:
    """Yield a file's records; for a suffix in TOLD_BY_NAME, only its columns, as the file would be read whole."""
    if file.suffix in TOLD_BY_NAME:
        yield Record(file, str(file), dict.fromkeys(TOLD_BY_NAME[file.suffix].needs))
    else:
        yield from read_records(file, torn=True)


def recognise(record: Record, formats: Mapping[str, Format]) -> Format:
    """Return the format of a record, native if nearly so. Raises InputError with the nearest format if none fits."""
    names = set(record.columns)
    if record.path.suffix in TOLD_BY_NAME:
        return formats[TOLD_BY_NAME[record.path.suffix].name]
    if is_native(names) and (names & NATIVE_ALONE or not RL_LOGGING_BOARD.needs <= names):
        return formats["native"]
    fitting = [form for form in formats.values() if form.needs and form.needs <= names]
    # The first row may hold nulls in columns that other rows fill.
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
