"""Commands in several processes at once."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 900
"""Seconds after which processes count as hanging; on two idle cores they take ten to twenty, on busy ones minutes."""


@dataclass(frozen=True)
class Ended:
    """How one of several processes ended."""

    status: int
    stderr: str


def launch(*command: str | Path, count: int = 2, timeout: float = TIMEOUT) -> list[Ended]:
    """Run a command in that many processes at once, with the environment that torchrun gives them."""
    shared = os.environ | {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    shared["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [Ended(process.returncode, stderr) for process, stderr in zip(started, errors, strict=True)]


def free_port() -> int:
    """Below those that Linux gives to outgoing connections, lest one takes it before it is listened on."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("localhost", port))
            return port
