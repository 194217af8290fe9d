"""Environments in which other trainers' own code writes its logs: one for each package, made once, beside .venv."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[3] / ".venv-writers"


def python_with(*packages: str) -> Path:
    """The Python of an environment that holds these packages and is called after the first of them.

    The test is skipped where pip cannot have them.
    """
    home = HOME / packages[0]
    python, made = home / "bin" / "python", home / ".made"
    if not made.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", *packages]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot install {', '.join(packages)}: {done.stderr.strip().splitlines()[-1:]}")
        made.touch()
    return python


def write(python: Path, script: str, *arguments: object) -> None:
    """Run a script of this folder in another environment, where it can import `support`."""
    tests = Path(__file__).parents[2]
    command = [python, Path(__file__).with_name(script), *map(str, arguments)]
    plain = {"PYTHONPATH": str(tests), "PATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
