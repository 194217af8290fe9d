"""Comparing mathematical texts with math-verify in a separate process.

math-verify may compute for hours (on 10^{10^{10}}, say), its time limit works only in the main thread and counts
waiting on a busy machine, and it uses the user's loggers and warnings. So it runs in another process under a CPU time
limit, which is replaced if it overruns or dies.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from gradscope.errors import InputError

SECONDS = 5.0
"""CPU time limit for grading one answer; truths of the data sets took 0.02 s on average and 3.7 s at most."""


@functools.lru_cache(maxsize=10_000)
def is_equal(answer: str, truths: tuple[str, ...], *, as_text: bool = True) -> bool:
    """Return whether the answer equals one of the truths; False if math-verify raises, dies or exceeds SECONDS.

    as_text: whether equal text is enough; otherwise both must parse as mathematics.
    """
    return _verifier.ask(answer, truths, as_text)


class _Verifier:
    """The process, started on first use and again after an answer that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._owner = 0
        self._lock = threading.Lock()
        atexit.register(self._stop)

    def ask(self, answer: str, truths: Sequence[str], as_text: bool) -> bool:
        with self._lock:
            reply = b""
            try:
                # A forked process must not share the pipes: it would read the other's replies.
                if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                    self._start()
                self._process.stdin.write(json.dumps([SECONDS, answer, truths, as_text]).encode() + b"\n")
                reply = self._process.stdout.readline()
            finally:
                if not reply:  # it died or, after Ctrl-C, would reply to this question when asked the next
                    self._stop()
        return reply == b"True\n"

    def _start(self) -> None:
        self._stop()
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from gradscope.tasks.math_verifier import serve; serve()"],
            env=os.environ | {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._owner = os.getpid()
        if (reply := self._process.stdout.readline()) != b"ready\n":
            raise InputError(f"math-verify does not start ({reply.decode().strip()}); pip install math-verify")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._owner == os.getpid():
            process.kill()
            process.wait()
        process.stdin.close()
        process.stdout.close()


_verifier = _Verifier()


def serve() -> None:
    """Answer JSON lines with the arguments of `ask` from stdin by True or False, until it closes."""
    replies, sys.stdout = sys.stdout, sys.stderr  # keep libraries' output out of the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    try:
        import math_verify  # noqa: F401  (slow: not on the clock of the first question)
        from sympy.core.random import seed
    except ImportError as error:
        print(error, file=replies, flush=True)
        return
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        seconds, answer, truths, as_text = json.loads(line)
        seed(0)  # sympy compares at random points: make replies reproducible
        _limit_cpu(seconds)
        right = any(_verify(truth, answer, as_text) for truth in truths)
        _limit_cpu(0)
        print(right, file=replies, flush=True)


def _limit_cpu(seconds: float) -> None:
    """Let the system kill this process after this much CPU time; 0: no limit. Not available on Windows."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _verify(truth: str, answer: str, as_text: bool) -> bool:
    from math_verify import verify

    gold, given = ([one for one in _parse(text) if as_text or not isinstance(one, str)] for text in (truth, answer))
    return verify(gold, given, timeout_seconds=None, **_precision(gold))


@functools.lru_cache(maxsize=1000)
def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # Without ExprExtractionConfig, which extracts a number from anything.
    return parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)


def _precision(gold: list[Any]) -> dict[str, int]:
    """Return math-verify's settings for small truths; its default of 15 decimals equates 5e-27 and 6e-20."""
    size = abs(float(gold[0])) if gold and getattr(gold[0], "is_real", False) and gold[0].is_number else 1.0
    if not 0 < size < 1e-3:
        return {}
    decimals = -math.floor(math.log10(size))
    return {"float_rounding": decimals + 2, "numeric_precision": decimals + 15}
