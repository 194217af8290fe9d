"""Gradscope's long commands on work so small that each takes about a second, and what counts as the same result."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from tests.support.policies import make_policy, make_responses, save_checkpoint, write_jsonl

TASK = """
from gradscope.tasks import Grade, Question, register

class Parity:
    name = "parity"

    def questions(self, n, *, seed, people=(2, 3), **_):
        levels = [people[i % len(people)] for i in range(n)]
        return [Question(f"w{4 + (seed + i) % 90} w{4 + i % 7}", i % 2, level) for i, level in enumerate(levels)]

    def reward(self, response, question):
        return self.grade(response, question).reward

    def grade(self, response, question):
        correct = len(response.split()) % 2 == question.answer
        return Grade(2.0 * correct - 1.0, correct, "w5" not in response)

parity = register(Parity())
"""
TRAIN = """
train --model INPUTS/model --task INPUTS/task.py:parity --steps 3 --save-every 1 --keep-checkpoints=2 --device cpu
--questions-per-step 2 --group-size 2 --mini-batch-size 4 --max-new-tokens 50 --learning-rate 1e-3 --save-rollouts
--resume --out OUT
"""
COMMANDS = {
    "measure": "measure INPUTS/model INPUTS/rollouts.jsonl --gradient-memory 1000000000 --out OUT",
    "diagnose": "diagnose INPUTS/model --rollouts INPUTS/rollouts.jsonl --gradient-memory 1000000000 --no-compare "
    "--out OUT",
    "compare": "compare INPUTS/model INPUTS/rollouts.jsonl --weightings grpo reweight:alpha=0.3 --out OUT",
    "evaluate": "evaluate INPUTS/model --task INPUTS/task.py:parity --k 1 --questions 3 --max-new-tokens 6 --out OUT",
    "train": " ".join(TRAIN.split()),
}
"""Each is begun and taken up again by the same words."""
FIELDS = ("prompt_ids", "response_ids", "group", "temperature", "reward", "old_logprobs", "response_mask")
TIMED = ("seconds", "tokens_per_second", "pass_seconds")
"""What differs from run to run: how long something took. In metrics: columns that begin so."""


def make_inputs(inputs: Path) -> None:
    """A policy, its rollouts and a task."""
    save_checkpoint(inputs / "model", "qwen2")
    sizes = {"lengths": (6,) * 12, "prompt_lengths": (4,) * 12}
    responses = make_responses(make_policy("qwen2"), **sizes)
    write_jsonl(inputs / "rollouts.jsonl", [{name: getattr(r, name) for name in FIELDS} for r in responses])
    (inputs / "task.py").write_text(TASK)


def words(command: str, inputs: Path, out: Path) -> list[str]:
    """Its command line."""
    return [word.replace("INPUTS", str(inputs)).replace("OUT", str(out)) for word in COMMANDS[command].split()]


def contents(out: Path) -> dict[str, Any]:
    """What a folder holds, by path: bytes, but for times; None for a folder.

    Left out are trackers/, whose files are named by the time, and what random_states.pt says: states of generators
    that begin anywhere, since a run draws from others, made of its seed.
    """
    found = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if "trackers" not in path.relative_to(out).parts:
            found[name] = _content(path) if path.is_file() else None
    return found


def _content(path: Path) -> Any:
    data = path.read_bytes()
    if path.name == "random_states.pt":
        return _is_zip(data)
    try:
        if path.name == "manifest.json":
            found = _untimed(json.loads(data))
            found.pop("commit", None)
            found.get("settings", {}).pop("overwrite", None)
            return found
        if path.name == "metrics.jsonl":
            return [_untimed(json.loads(line)) for line in data.splitlines()]
    except ValueError:
        pass
    return data


def _is_zip(data: bytes) -> bool:
    return zipfile.is_zipfile(io.BytesIO(data))


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _untimed(v) for name, v in value.items() if not name.startswith(TIMED)}
    return [_untimed(v) for v in value] if isinstance(value, list) else value
