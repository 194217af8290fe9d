"""Trace a batch's way through `measure` and `diagnose` by the files that it enters.

    python analyses/benchmarks/batch_way.py [--list]

Functions count in the order of their first call, once each, as someone reads them who follows the execution; loops
therefore add nothing. A return is a step into a file that was entered and left before. `--list` prints the way itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

import gradscope

PACKAGE = Path(gradscope.__file__).parent


def trace(call: Callable[[], object]) -> tuple[object, list[str]]:
    """Return the call's result, and the file of every function of gradscope in the order of first calls."""
    seen: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and code.co_filename.startswith(f"{PACKAGE}/"):
            seen.setdefault(code)

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, [Path(code.co_filename).relative_to(PACKAGE).as_posix() for code in seen]


def describe(name: str, files: list[str], *, way: bool) -> str:
    """One line: how many files, functions and returns; with `way` the files in their order below it."""
    steps = [file for file, _ in groupby(files)]
    line = f"{name}: {len(set(steps))} files, {len(files)} functions, {len(steps) - len(set(steps))} returns"
    return "\n    ".join([line, *steps]) if way else line


def main(arguments: list[str]) -> None:
    policy = gradscope.load_policy("embedded")
    options = {"questions": 2, "n": 4, "max_new_tokens": 40, "temperature": 0.7, "seed": 1}
    batch = gradscope.sample(policy, task="knights-knaves-compact", **options)
    table, files = trace(lambda: gradscope.measure(policy, batch))
    print(describe("measure", files, way="--list" in arguments))
    _, files = trace(lambda: gradscope.diagnose(policy, batch, table))
    print(describe("diagnose", files, way="--list" in arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
