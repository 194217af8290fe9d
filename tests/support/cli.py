"""`gradscope` in this process, and what it says where it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from gradscope.cli import commands as cli
from gradscope.errors import InputError


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


def run(*arguments: object) -> None:
    """Run a command."""
    cli.main([str(argument) for argument in arguments])


def outcome_of(capsys, *arguments: object) -> Outcome:
    """Run a command to its exit status."""
    capsys.readouterr()
    try:
        run(*arguments)
        status = 0
    except SystemExit as stop:
        status = stop.code
    return Outcome(status, *capsys.readouterr())


def assert_one_line(outcome: Outcome, words: str = "", *, status: int = 2) -> None:
    """Nothing but one line of complaint, with these words in it."""
    assert (outcome.status, outcome.out) == (status, ""), outcome.err
    assert re.fullmatch(r"gradscope: [^\n]+\n", outcome.err), outcome.err
    assert words in outcome.err, outcome.err


def refusal(capsys, *arguments: object) -> str:
    """The one line on stderr of a command that refuses its input, with exit status 2."""
    outcome = outcome_of(capsys, *arguments)
    assert outcome.status == 2 and re.fullmatch(r"gradscope: [^\n]+\n", outcome.err), outcome.err
    return outcome.err


def complaint(call: Callable[..., object], *arguments: object, **settings: object) -> str:
    """The one line of a function that refuses its input."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)
