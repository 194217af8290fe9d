"""The command line: `gradscope demo`, `sample`, `measure`, …; each command is a dataclass in its own file.

Only the chosen command is imported, so that `--help` and `--version` do not wait for torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import make_dataclass, replace
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from operator import or_
from types import FrameType
from typing import Any

import tyro

from gradscope import __version__
from gradscope.errors import (
    LESS_MEMORY,
    DivergedError,
    InputError,
    SelfCheckError,
    SyncError,
    is_out_of_memory,
    printable,
)

COMMANDS = {
    "demo": "Try it on the embedded policy: sample responses to puzzles, measure them, draw figures, print a summary.",
    "sample": "Sample responses, with rewards if the task has them, into a rollout file for `measure`.",
    "measure": "Measure the gradient of every response token in a rollout file: token table, figures, summary.",
    "diagnose": "Diagnose checkpoints on their rollouts: which tokens drive an update, as one HTML file.",
    "compare": "Compare token weightings on one batch: which tokens each favours, and how much is signal.",
    "audit": "Compare a trainer's gradient with the exact gradient of its loss.",
    "train": "Train a policy with GRPO or REINFORCE++, Advantage Reweighting and Lopti.",
    "evaluate": "Evaluate a policy on a task's questions: greedy accuracy, avg@k and pass@k, with intervals.",
}
"""Command → its line of help. The command's file defines a class of the capitalised name."""
EXAMPLES = {
    "demo": ("", "--out demo-out"),
    "sample": (
        "embedded --task knights-knaves-compact --temperature 0.7 --out rollouts.jsonl",
        "runs/checkpoint-500 --prompts prompts.jsonl --out rollouts.jsonl",
    ),
    "measure": (
        "runs/checkpoint-500 runs/completions --step 501 --temperature 0.7 --out measured",
        "runs/checkpoint-500 rollouts.jsonl --plan",
    ),
    "diagnose": (
        "runs/checkpoint-500 --rollouts runs/completions --temperature 0.7 --out report",
        "runs/checkpoint-* --rollouts runs/completions --temperature 0.7 --out report",
        "runs --rollouts runs/completions --temperature 0.7 --follow --out report",
    ),
    "compare": (
        "runs/checkpoint-500 rollouts.jsonl --out compared",
        "runs/checkpoint-500 rollouts.jsonl --weightings reweight:alpha=.1/.3 lopti own.py:mine --out compared",
    ),
    "audit": (
        "runs/checkpoint-500 step-501.jsonl --gradient grad-501.safetensors --micro-batch 8",
        "runs/checkpoint-500 step-501.jsonl --grad-norm 0.1834",
        "embedded --suite suite",
        "embedded --suite suite --expect token-mean --out suite-audit",
    ),
    "train": (
        "--preset kk-embedded --reweight-alpha 0.3 --out runs/reweight",
        "--preset kk-embedded --lopti-eta 0.5 --out runs/lopti --resume",
    ),
    "evaluate": ("runs/checkpoint-500 --task math --data math500.parquet --k 16 --out evaluated",),
}
"""Example arguments by command."""
GO_ON = {"train": "run the same command with --resume to continue", "sample": "nothing was saved"}
"""Advice after an interruption; the default is to run the same command again."""
INTERRUPTED = 130
"""Exit status after Ctrl-C."""
SOON = 0.1
"""Seconds before retrying an interruption that arrived during an import."""
OPTIONS = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)


def _parse(args: Sequence[str]) -> Any:
    """Parse argv into a command. Help, the version and usage errors print and exit."""
    if args and args[0] in COMMANDS:
        flags, module = import_module("gradscope.cli.flags"), import_module(f"gradscope.cli.{args[0]}")
        command = getattr(module, args[0].capitalize())
        defaults = command.defaults(args) if hasattr(command, "defaults") else {}
        lines = [f"  gradscope {args[0]} {example}".rstrip() for example in EXAMPLES[args[0]]]
        about = "\n".join([" ".join(command.__doc__.split()), "", "Examples:", *lines])
        own = {"prog": f"gradscope {args[0]}", "args": args[1:], "description": about}
        parsed = tyro.cli(command, **own, **defaults, config=OPTIONS, registry=flags.REGISTRY)
        return replace(parsed, loss_flags=flags.find_loss_flags(args)) if hasattr(parsed, "loss_flags") else parsed
    if list(args) == ["--version"]:
        print(f"gradscope {__version__}")
        raise SystemExit(0)
    if args and not args[0].startswith("-") and (near := get_close_matches(args[0], COMMANDS, 1)):
        raise InputError(f"there is no command {args[0]!r}; did you mean {near[0]}?")
    names = [make_dataclass(name, [], namespace={"__doc__": words}) for name, words in COMMANDS.items()]
    about = "Which tokens drive an RL update of a language model? `gradscope COMMAND --help` lists a command's flags."
    return tyro.cli(reduce(or_, names), args=args, prog="gradscope", description=about, config=OPTIONS)


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; exit status 0: success, 2: bad input or flag, 1: self-check or OS error, 130: interrupted."""
    args = sys.argv[1:] if args is None else list(args)
    go_on = GO_ON.get(args[0] if args else "", "run the same command to continue")
    try:
        _parse(args).run()
        if sys.stdout is not None:  # closed by the shell
            sys.stdout.flush()
    except KeyboardInterrupt:
        _stop(RuntimeError(f"interrupted; {go_on}"), INTERRUPTED)
    except BrokenPipeError:  # the reader has gone (`| head`); Python would try to flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        _refuse(error, go_on)
    if "WORLD_SIZE" in os.environ:
        from gradscope.runs import leave_launch

        leave_launch()


def _refuse(error: Exception, go_on: str) -> None:
    """Exit with one line and a status for errors due to input or machine; re-raise bugs."""
    if isinstance(error, InputError):
        _stop(error, 2)
    if isinstance(error, SelfCheckError | SyncError | DivergedError | OSError):
        _stop(error, 1)
    if _tells_of_another(error):
        _stop(RuntimeError(f"another process of this run has ended, so this one stops as well; {go_on}"), 1)
    if is_out_of_memory(error):
        told = str(error).splitlines() or ["Python's own"]
        _stop(RuntimeError(f"out of memory ({told[0]}); {LESS_MEMORY}"), 1)
    raise error


def _tells_of_another(error: Exception) -> bool:
    """Return whether the error says that another process has failed: torch's by its type, gloo's by its text."""
    if os.environ.get("WORLD_SIZE", "") in ("", "1"):
        return False
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in kinds or ("RuntimeError" in kinds and "gloo" in str(error))


def _stop(error: Exception, status: int) -> None:
    if status == 2 and os.environ.get("RANK", "0") not in ("", "0"):
        time.sleep(3)  # the first process reports it, too, upon which a launcher, if there is one, kills this one
        if _has_joined():
            raise SystemExit(status)
    print(f"gradscope: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    raise SystemExit(status)


def _has_joined() -> bool:
    """Return whether this process has joined others, rather than only been told of them by the environment."""
    processes = sys.modules.get("gradscope.runs.processes")  # not loaded for a mistake that needs no torch
    return processes is not None and processes.has_joined()


def run_script() -> None:
    """Entry point of the console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")  # an encoding without "−" or "‖": Latin-1, a Windows code page
    if sys.stdout is not None and not sys.stdout.isatty():
        sys.stdout.reconfigure(line_buffering=True)  # keeps notes and progress in order in a log
    try:
        main()
    except SystemExit as error:
        if error.code == INTERRUPTED:
            # Exit at once: Python's shutdown waits for threads, aborts if they free tensors, or repeats the signal.
            os._exit(INTERRUPTED)
        raise


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but not during an import: modules swallow it, and C++ extensions abort."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            again = threading.Timer(SOON, os.kill, [os.getpid(), number])
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt
