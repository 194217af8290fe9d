"""Rows of several runs in one log: steps that a restart wrote again, files of an earlier run, rows written twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradscope.rollouts.batch import Note, Response
from gradscope.rollouts.formats.base import Row

LATER = 60.0
"""Seconds by which a file has to be older than that of an earlier step to be of an earlier run; copying takes less."""
LONG = 16
"""Tokens from which two equal responses are unlikely to have been sampled."""


@dataclass(frozen=True)
class Visit:
    """Where a row stands in a file whose steps may go back: the rows between two such places are a pass."""

    path: Path | None
    number: int
    step: int | None


class Passes:
    """The passes of each file, by which a run that went on from an earlier step shows."""

    def __init__(self, files: Mapping[Path, int] | None = None) -> None:
        """files: steps of files that are not read."""
        self._last: dict[Path | None, Visit] = {}
        self._prompts: defaultdict[tuple[Path | None, int, int], Counter[int]] = defaultdict(Counter)
        """Prompts of a file's pass and step, and how often each occurs."""
        self._starts: defaultdict[Path | None, list[int]] = defaultdict(list)
        self._steps = defaultdict(set, {path: {step} for path, step in (files or {}).items()})
        self._found: dict[Path | None, dict[int, int]] = {}
        self._block: tuple[tuple, int] = (), 0
        """The newest row's pass, step and prompt, and how many rows before it had the same."""
        self._closed: set[tuple] = set()
        """Blocks of several rows that others followed."""
        self._again: set[Visit] = set()
        """Passes and steps in which such a block begins anew."""

    def take(self, row: Row) -> Visit:
        """Return where the next row stands."""
        before = self._last.get(row.path)
        if row.step is None or row.left_out is not None:
            return Visit(row.path, before.number if before else 0, row.step)
        number = 0 if before is None else before.number + (row.step < before.step)
        if before is None or number > before.number:
            self._starts[row.path].append(row.step)
        self._steps[row.path].add(row.step)
        self._last[row.path] = visit = Visit(row.path, number, row.step)
        prompt = row.columns.get("prompt_ids", row.columns.get("prompt"))
        try:
            own = hash(tuple(prompt))
        except TypeError:  # a chat, or none
            own = str(prompt)
        key = hash((str(row.columns.get("process")), own))
        self._prompts[row.path, number, row.step][key] += 1
        self._close((row.path, number, row.step, key), visit)
        return visit

    def _close(self, block: tuple, visit: Visit) -> None:
        """Note whether a prompt's rows begin again after those of others."""
        before, length = self._block
        if block != before:
            self._closed |= {before} if length > 1 else set()
            self._again |= {visit} if block in self._closed else set()
        self._block = block, length + 1 if block == before else 1

    def is_stale(self, visit: Visit) -> bool:
        """Return whether a later pass of the file began at this row's step or an earlier one, with the same prompts."""
        restarts = self._restarts(visit.path).items()
        return visit.step is not None and any(number > visit.number and visit.step >= s for number, s in restarts)

    def _restarts(self, path: Path | None) -> dict[int, int]:
        """Return the passes that repeat what an earlier one began, and the steps with which they begin."""
        if path not in self._found:
            starts, found = self._starts[path], {}
            for number, step in enumerate(starts if self._is_orderly(path) else ()):
                again = self._prompts[path, number, step]
                earlier = [self._prompts.get((path, before, step)) for before in range(number)]
                repeats = any(own and own <= again for own in earlier)
                if repeats and step >= starts[0] and again.total() > 1:  # a single row is no step written whole
                    found[number] = step
            self._found[path] = found
        return self._found[path]

    def _is_orderly(self, path: Path | None) -> bool:
        """Return whether steps go back so seldom that rows are in the order in which they were written."""
        return len(self._starts[path]) <= len(self._steps[path]) + 1

    def notes(self, visits: Collection[Visit]) -> list[Note]:
        """Return notes on steps that come back with other prompts, and on files of an earlier run, among these rows."""
        passes: defaultdict[tuple[Path | None, int | None], set[int]] = defaultdict(set)
        for visit in visits:
            passes[visit.path, visit.step].add(visit.number)
        back = sorted(step for (path, step), n in passes.items() if len(n) > 1 and self._is_orderly(path))
        back = sorted({*back, *(visit.step for visit in self._again & {*visits})})
        told = []
        if back:
            words = f"{_name_steps(back)} in the log, after later steps or after all of their prompts: rows of several"
            told.append(f"{words} runs or processes are read together")
        own = {visit.path for visit in visits}
        stale = sorted(step for path, step in self._left_over().items() if path in own)
        if stale:
            span = f"step {stale[0]}" if len({*stale}) == 1 else f"{len({*stale})} steps, {stale[0]} to {stale[-1]},"
            words = f"{len(stale)} of the log's files, of {span} were written before those of an earlier step or of the"
            told.append(f"{words} rest of theirs: they may be left from an earlier run, of another policy")
        return [Note(words, "several-runs") for words in told]

    def _left_over(self) -> dict[Path, int]:
        """Return the files that are older than one of an earlier step, or another of their only step; their steps."""
        found, newest, reached = {}, 0.0, None
        ages = {path: path.stat().st_mtime for path in self._steps if path is not None and path.exists()}
        spans = {path: (min(self._steps[path]), max(self._steps[path])) for path in ages if self._steps[path]}
        for path in sorted(spans, key=lambda path: (*spans[path], -ages[path])):
            low, high = spans[path]
            if reached is not None and (low > reached or low == high == reached) and ages[path] < newest - LATER:
                found[path] = low
            newest, reached = max(newest, ages[path]), max(high, low if reached is None else reached)
        return found


def _name_steps(steps: Sequence[int]) -> str:
    alone = f"step {steps[0]} comes back"
    return alone if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}, come back"


def note_twice(responses: Sequence[Response]) -> list[Note]:
    """Return a note if all responses are in the log at least twice, or long ones are, equal in all that is logged."""
    each = [_identity(response) for response in responses]
    count = Counter(each)
    doubled = len(count) > 1 and min(count.values()) > 1
    again = [
        one
        for one, r in zip(each, responses, strict=True)
        if count[one] > 1 and (doubled or len(r.response_ids) >= LONG)
    ]
    if not again:
        return []
    words = f"{len(again)} of {len(each)} responses are rows that occur several times in the log, equal in every column"
    return [Note(f"{words} ({len({*again})} different ones): each counts as often as it occurs", "several-runs")]


def _identity(response: Response) -> int:
    lists = response.prompt_ids, response.response_ids, response.old_logprobs or (), response.sampler_logprobs or ()
    return hash((response.step, response.group, response.reward, str(response.advantage), *map(tuple, lists)))
