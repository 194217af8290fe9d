"""How a command is refused: the input is at fault, or what would come out cannot be trusted."""

import os
import sys


class InputError(ValueError):
    """What the user gave cannot be used; one line that says what, where and what to do (the CLI exits with 2).

    path: the file at fault, named before the reason.

    >>> error = InputError("it is empty; give a prompt per line", path="prompts.txt")
    >>> str(error), error.reason
    ('prompts.txt: it is empty; give a prompt per line', 'it is empty; give a prompt per line')
    """

    def __init__(self, reason: str, *, path: object = None) -> None:
        super().__init__(reason if path is None else f"{path}: {reason}")
        self.reason = reason


class NanLogitsError(InputError):
    """A policy whose logits are NaN, so that nothing can be sampled; in training it has diverged."""


class SelfCheckError(RuntimeError):
    """The engine's numbers differ from plain autograd's on this model; nothing was measured (the CLI exits with 1)."""


class SyncError(RuntimeError):
    """The sampler does not sample with the trained weights (the CLI exits with 1)."""


class DivergedError(RuntimeError):
    """Training has no finite gradient any more; the checkpoints are kept (the CLI exits with 1)."""


def stop_printing() -> int:
    """After a BrokenPipeError, of `head` that has read enough: what is left to print goes nowhere; exit status 1."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def unpickling_reason(error: Exception) -> str:
    """What torch.load with weights_only refused, on one line, without its advice to load the file with all it runs.

    >>> unpickling_reason(ValueError("Weights only load failed. Re-run with False.\\n\\nUnsupported operand 149\\n"))
    'Unsupported operand 149'
    """
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "unsupported" in line.lower()]
    return (named or [first_line(error)])[0][:160]


def first_line(error: Exception) -> str:
    """The first line of what an error says, to be quoted within a line; its kind where it says nothing.

    >>> first_line(ValueError("no such key.\\nTraceback …"))
    'no such key'
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".!:")
