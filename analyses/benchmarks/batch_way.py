"""Trace a batch's way through `measure` and `diagnose` by the files it enters.

    python analyses/benchmarks/batch_way.py [--list]

Each function counts once, in the order of first calls, as a reader would meet it; loops add nothing. A return is a step
back into a file that was left before. `--list` prints the way itself. For work that a batch should go through only once
(COUNTED), every call counts.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

import gradscope

PACKAGE = Path(gradscope.__file__).parent
COUNTED = ("check_batch", "find_caveats", "note_logged", "micro_batches")


def trace(call: Callable[[], object]) -> tuple[object, Counter[CodeType]]:
    """Return the call's result, and how often each function of gradscope was called, in the order of first calls."""
    seen: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and code.co_filename.startswith(f"{PACKAGE}/"):
            seen[code] += 1

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, seen


def describe(name: str, seen: Counter[CodeType], *, way: bool) -> str:
    """Summarize files, functions, returns and calls in one line; `way` lists the files below it."""
    steps = [file for file, _ in groupby(Path(code.co_filename).relative_to(PACKAGE).as_posix() for code in seen)]
    calls = {own: sum(count for code, count in seen.items() if code.co_name == own) for own in COUNTED}
    line = f"{name}: {len(set(steps))} files, {len(seen)} functions, {len(steps) - len(set(steps))} returns; "
    line += ", ".join(f"{own} × {count}" for own, count in calls.items())
    return "\n    ".join([line, *steps]) if way else line


def main(arguments: list[str]) -> None:
    policy = gradscope.load_policy("embedded")
    options = {"questions": 2, "n": 4, "max_new_tokens": 40, "temperature": 0.7, "seed": 1}
    batch = gradscope.sample(policy, task="knights-knaves-compact", **options)
    table, seen = trace(lambda: gradscope.measure(policy, batch))
    print(describe("measure", seen, way="--list" in arguments))
    _, seen = trace(lambda: gradscope.diagnose(policy, batch, table))
    print(describe("diagnose", seen, way="--list" in arguments))
    _, seen = trace(lambda: gradscope.diagnose(policy, batch))
    print(describe("diagnose without a table", seen, way=False))


if __name__ == "__main__":
    main(sys.argv[1:])
