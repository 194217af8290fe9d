"""Read any trainer's rollout files into a TokenBatch; formats are registered by name, one module each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import pandas as pd

from gradscope.errors import InputError, checked
from gradscope.policy import Policy, PolicyLike, checkpoint_step, load_policy
from gradscope.rollouts.batch import Note, TokenBatch
from gradscope.rollouts.caveats import find_caveats, served_prompts
from gradscope.rollouts.check_batch import check_batch
from gradscope.rollouts.dump import Dump, choose_step, make_dump, note_step
from gradscope.rollouts.files import Record, list_files, named_steps, read_records, read_run, write_rows
from gradscope.rollouts.formats.areal import AREAL
from gradscope.rollouts.formats.base import TORN, Format, ReadingOptions, Row
from gradscope.rollouts.formats.columns import read_rows
from gradscope.rollouts.formats.ms_swift import MS_SWIFT
from gradscope.rollouts.formats.native import NATIVE, count_columns, is_native
from gradscope.rollouts.formats.nemo_rl import NEMO_RL
from gradscope.rollouts.formats.open_instruct import OPEN_INSTRUCT
from gradscope.rollouts.formats.prime_rl import PRIME_RL, PRIME_RL_TRACES, VERIFIERS, VERIFIERS_GRAPH
from gradscope.rollouts.formats.rl_logging_board import RL_LOGGING_BOARD
from gradscope.rollouts.formats.rllm import RLLM
from gradscope.rollouts.formats.roll import ROLL
from gradscope.rollouts.formats.skyrl import SKYRL
from gradscope.rollouts.formats.slime import SLIME
from gradscope.rollouts.formats.torchtitan import TORCHTITAN
from gradscope.rollouts.formats.trl import TRL
from gradscope.rollouts.formats.trl_datasets import TRL_KTO, TRL_PREFERENCE, TRL_SFT
from gradscope.rollouts.formats.verl import VERL
from gradscope.rollouts.restarts import Passes
from gradscope.runs import parquet_values, parse_json, run_file

READERS: dict[str, Format] = {
    form.name: form
    for form in (
        *(NATIVE, TRL, VERL, PRIME_RL, PRIME_RL_TRACES, NEMO_RL, OPEN_INSTRUCT, SLIME, MS_SWIFT, ROLL, VERIFIERS),
        *(VERIFIERS_GRAPH, SKYRL, TORCHTITAN, AREAL, RLLM, RL_LOGGING_BOARD, TRL_PREFERENCE, TRL_KTO, TRL_SFT),
    )
}
"""Reader of each format, by name."""

READER = 4
"""Version of the readers; increment it when any reader's output changes."""

IDS, TEXT = frozenset({"prompt_ids", "response_ids"}), frozenset({"prompt", "response"})
NATIVE_ALONE = IDS | {"old_logprobs"}
"""Columns that together nobody but native rows has."""

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


Rows = pd.DataFrame | list | tuple
"""Rows of a rollout file, in any known format: a DataFrame, or a mapping each.

Not a `Sequence[Mapping]`: to check an item, `@checked` would draw one from the caller's random numbers.
"""
BatchLike = TokenBatch | str | Path | Rows
"""A batch, or what `read_rollouts` reads it from."""


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
        batch = replace(batch, notes=find_caveats(batch, stop_ids=policy.stop_ids, pad_ids=policy.pad_ids))
    return policy, batch, {}


@checked
def read_rollouts(
    path: str | Path | Rows,
    policy: PolicyLike | None = None,
    *,
    format: str | None = None,
    step: int | Literal["all"] | None = None,
    temperature: int | float | None = None,
    reward_key: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokenBatch:
    """Read rollouts into a TokenBatch whose `notes` list what reading assumed; for the arguments see `read_dump`.

    path: a file or folder, or its rows. step: training step whose responses to keep, or "all". Steps were sampled by
    different policies, so if the log holds several and `step` is None, InputError is raised.
    """
    how = {"temperature": temperature, "reward_key": reward_key, "chat_template_kwargs": chat_template_kwargs}
    return _read_one(path, policy, step, format=format, **how).batch


def _read_one(
    path: str | Path | Rows, policy: PolicyLike | None, step: int | Literal["all"] | None = None, **how: Any
) -> Dump:
    """Read the responses of one training step; see `read_rollouts`."""
    if not isinstance(path, str | Path):
        with tempfile.TemporaryDirectory() as folder:
            file = write_rows(path, Path(folder))
            try:
                return _read_one(file, policy, step, **how)
            except InputError as error:
                raise InputError(str(error).replace(str(file), "the given rows")) from None
    dump = read_dump(path, policy, step=None if step == "all" else step, **how)
    steps = [] if dump.steps is None else dump.steps.unique().tolist()
    if step is None and len(steps) > 1:
        raise InputError(
            f"{path} holds {len(steps)} training steps, {steps[0]} to {steps[-1]}, each sampled by a different "
            'checkpoint; give step=, one of them, or "all"'
        )
    if isinstance(step, int) and policy is not None:
        return note_step(dump, checkpoint_step(policy.path if isinstance(policy, Policy) else policy))
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
    format: name in READERS, or FILE.py:NAME, a `Format` of your own; None detects it from the columns of each file's
        first record.
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
    how = ReadingOptions(steps, temperature, reward_key, chat_template_kwargs)
    if temperature is not None and not 0 < temperature < float("inf"):
        raise InputError(f"temperature is {temperature}; give a positive number")
    form, files, unfinished = _open(path, format)
    told = {} if steps is None else {file: _only_step(form, file) for file in files}
    others = {file: own for file, own in told.items() if own not in (None, *steps)}
    if len(others) == len(files):  # no such step: all are read, to name those that there are
        others = {}
    files = {file: named for file, named in files.items() if file not in others}
    notes = [*form.notes] + ([f"{unfinished} unfinished files left out (no marker STABLE)"] if unfinished else [])
    dump = make_dump(_rows(form, files, policy), policy, form, path=path, options=how, notes=notes, others=others)
    batch = replace(dump.batch, run=read_run(files))
    if (words := batch.run.words) is None:
        return replace(dump, batch=batch)
    # These advantages are made of weights, which no group's size bounds.
    return replace(dump, batch=batch.without_notes("impossible-advantages")).with_note(words, "loss")


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
    passes = Passes()
    visits = {passes.take(row) for row in _rows(form, unknown, None) if row.left_out is None}
    steps = {visit.step for visit in visits if not passes.is_stale(visit)} | {*told.values()}
    return LogSteps(tuple(sorted(step for step in steps if step is not None)), form.first_step, unfinished)


def read_checkpoint_dump(
    path: Path,
    policy: Policy | None,
    checkpoint: int | None,
    *,
    step: Step = None,
    prompts: int = 0,
    **how: Unpack[ReadingKeywords],
) -> Dump:
    """Read the responses that a checkpoint sampled: those of the training step after its own, or else of the nearest.

    Notes say which step is used, unless it is the log's only one. The whole log is read if its steps, or the
    checkpoint's, are unknown. Only these responses are tokenized and batched, so other steps do not change them.

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
    return note_step(read_dump(path, policy, step=own, **how), checkpoint)


def _pool(dump: Dump, earlier: list[int], prompts: int, read: Callable[[list[int]], Dump], note: Note) -> Dump:
    """Add earlier steps, latest first, until `prompts` prompts have an advantage. note: names the dump's step."""
    [own], alone = dump.steps.unique().tolist(), len(served_prompts(dump.batch))
    if alone >= prompts or not earlier:
        return dump
    batch = read([*earlier, own]).batch
    served = (first for first in reversed(earlier) if len(served_prompts(batch[batch.steps >= first])) >= prompts)
    first = next(served, earlier[0])
    chosen = [step for step in earlier if step >= first]
    taken = f"step {first} is" if len(chosen) == 1 else f"steps {first} to {chosen[-1]} are"
    few = f"{alone} prompt{' has' if alone == 1 else 's have'} an advantage, fewer than {prompts}"
    words = f"{taken} added to step {own}, in which {few} (--step own uses step {own} alone)"
    return read([*chosen, own]).with_note(note, note.kind).with_note(words, "pooled")


def find_reader(name: str) -> Format:
    """Return the format of that name, maybe with settings, NAME:key=value,…; or the user's own, FILE.py:NAME."""
    file, colon, own = name.rpartition(":")
    form = getattr(run_file(Path(file), "format"), own, None) if colon and file.endswith(".py") else READERS.get(name)
    plain, _, given = name.partition(":")
    if given and (made := READERS.get(plain)) is not None and made.make is not None:
        return made.make(**_parse_settings(plain, given, made.settings))
    if not isinstance(form, Format):
        raise InputError(
            f"rollout format {name!r} is not known; use one of {', '.join(sorted(READERS))}, or path/to/file.py:NAME, "
            "with NAME a gradscope.rollouts.Format of that file"
        )
    return form


def _parse_settings(name: str, given: str, kind: type) -> dict[str, Any]:
    """Parse key=value,… into settings of this dataclass, each of the type of its default."""
    defaults, found = {own.name: own.default for own in fields(kind)}, {}
    for part in given.split(","):
        key, _, word = part.partition("=")
        sort = {bool: bool, str: str}.get(type(defaults.get(key)), int | None)
        try:
            value = word if sort is str else None if word == "none" else parse_json(word)
        except ValueError:
            value = ""
        if key not in defaults or not isinstance(value, sort) or (sort is not bool and isinstance(value, bool)):
            known = ", ".join(f"{own}={str(value).lower()}" for own, value in defaults.items())
            raise InputError(f"--format {name}:{given}: {part!r} is no setting; give some of {known}")
        found[key] = value
    return found


def _open(path: Path, name: str | None) -> tuple[Format, dict[Path, int | None], int]:
    """Return a log's format, its finished files with the step in each name, and the number of unfinished files."""
    own = None if name is None else find_reader(name)
    files = list_files(path)
    form = _find_format(path, files, own)
    finished = [file for file in files if form.is_finished(file)]
    if not finished:
        raise InputError(
            f"{files[0]} has no marker STABLE beside it: {form.name} has not finished writing it; wait for it, or give "
            "another step's folder"
        )
    named = named_steps(finished)
    return form, {file: named.get(file) for file in finished}, len(files) - len(finished)


def _rows(form: Format, files: Mapping[Path, int | None], policy: Policy | None) -> Iterator[Row]:
    """Yield the rows of a log, and one for each line that was cut off."""
    torn: list[Row] = []

    def records() -> Iterator[Record]:
        for record in (one for file, step in files.items() for one in read_records(file, step=step, read=form.read)):
            if record.torn:
                torn.append(Row(record.place, {}, left_out=TORN))
            else:
                yield record

    yield from form.rows(records(), policy) if form.rows else read_rows(form, records(), policy)
    yield from torn


def _only_step(form: Format, file: Path) -> int | None:
    """Return the training step shared by all rows of a native parquet file, from its statistics, if they have it."""
    known = parquet_values(file, "step") if form is NATIVE and file.suffix == ".parquet" else None
    return next(iter(known)) if known is not None and len(known) == 1 and {*map(type, known)} == {int} else None


def _find_format(path: Path, files: list[Path], own: Format | None) -> Format:
    """Return the format shared by all files that hold a record. own: the one that was asked for."""
    found: tuple[Path, Format] | None = None
    for file in files:
        told = _told_by_suffix(file)  # such a file can only be read whole
        record = Record(file, str(file), dict.fromkeys(told.needs)) if told else next(read_records(file), None)
        if record is None or record.torn:
            continue
        form = recognise(record, READERS) if own is None else own
        if own is not None:
            check_format(record, form)
        if found is not None and form is not found[1]:
            raise InputError(
                f"{path} mixes formats: {found[0]} is {found[1].name}, {file} is {form.name}; give one of them, or a "
                "folder of one format"
            )
        found = found or (file, form)
    if found is None:
        if any(record.torn for file in files for record in read_records(file)):
            raise InputError(f"{path} holds no rows but one that was cut off; give at least one response")
        raise InputError(f"{path} holds no rows; give at least one response")
    return found[1]


def _told_by_suffix(file: Path) -> Format | None:
    return next((form for form in READERS.values() if form.suffix == file.suffix), None)


def recognise(record: Record, formats: Mapping[str, Format]) -> Format:
    """Return the format of a record, native if nearly so.

    A trainer's format fits if all of its required columns are there; a set that includes another's beats it. Native
    rows fit by ids; by text unless the trainer's format has a `prompt` or a `response`, so that only the other was
    added, or knows more of the columns. Raises InputError if several fit, and with the nearest format if none does.
    """
    names = set(record.columns)
    if (form := _told_by_suffix(record.path)) is not None:
        return form
    if names >= NATIVE_ALONE:
        return formats["native"]
    known = [form for form in formats.values() if form.needs and form.suffix is None]
    fitting = [form for form in known if form.needs <= names]
    # The first row may hold nulls in columns that other rows fill, but has a response or its ids.
    fitting = fitting or [form for form in known if form.needs <= names | record.nulls and _has_response(form, names)]
    fitting = [form for form in fitting if not any(form.needs < other.needs for other in fitting)]
    if is_native(names):
        fitting = [form for form in fitting if _has_response(form, names)]
        count = len(names & NATIVE.places)
        if names & IDS or not any(form.places & TEXT or len(names & form.places) > count for form in fitting):
            fitting.append(formats["native"])
    beside = (form for form in formats.values() if any(own <= names for own in form.beside) and not names & form.unlike)
    fitting = fitting or [*islice(beside, 1)]
    if len(fitting) > 1:
        raise InputError(
            f"{record.place}: it has all columns of {' and of '.join(form.name for form in fitting)}; give --format, "
            f"one of the {len(fitting)}"
        )
    if fitting:
        return fitting[0]
    common = {form.name: len(names & form.places) for form in formats.values() if form.needs}
    common["native"] = count_columns(names)
    nearest = max((formats[name] for name in common), key=lambda form: (common[form.name], form.name == "native"))
    if nearest.name == "native" and common["native"]:
        return nearest
    given = ", ".join(name[:40] for name in sorted(names)[:12]) or "none"
    if not common[nearest.name]:
        raise InputError(f"{record.place}: columns of no known format ({given}); known are {', '.join(formats)}")
    raise InputError(
        f"{record.place}: columns of no known format ({given}); the nearest is {nearest.name}, which also has "
        f"{', '.join(sorted(nearest.needs - names))}; give --format, or rename them to the native columns"
    )


def _has_response(form: Format, names: Collection[str]) -> bool:
    """Return whether these columns hold a response of the format; True for formats that keep it elsewhere."""
    own = {column.place for column in form.columns if column.name in ("response", "response_ids", "ids")}
    return not own or bool(own & {*names})


def check_format(record: Record, form: Format) -> None:
    """Raise InputError if a record lacks a column of the requested format."""
    missing = sorted(form.needs - record.columns.keys() - record.nulls)
    if missing and not any(own <= set(record.columns) for own in form.beside):
        raise InputError(
            f"{record.place}: no `{missing[0]}`, which every record of the format {form.name} has; leave --format out, "
            "or give another"
        )
