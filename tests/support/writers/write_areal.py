"""AReaL's own rollout.dump_to_file, of trajectories that are made here.

Package: areal 1.0.4. Run: `_dump_trajectory` of `WorkflowExecutor` in areal/infra/workflow_executor.py, taken out of
the file, for importing it needs the engines. Trajectories are those of `RLVRWorkflow` and `MultiTurnWorkflow`, padded
together as `GroupedRolloutWorkflow` does.

    PYTHONPATH=tests python tests/support/writers/write_areal.py OUT
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiofiles
import aiofiles.os
import numpy as np
from support.writers.sampled import EOS, STEPS, Sample

NAME = "_dump_trajectory"


def dumped(executor: Any, trajectory: dict[str, np.ndarray], task: int, is_eval: bool) -> tuple[bool, str]:
    """What AReaL's own method returns."""
    path = Path(importlib.util.find_spec("areal").origin).parent / "infra" / "workflow_executor.py"
    method = next(node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", None) == NAME)
    known = {"os": os, "json": json, "aiofiles": aiofiles, "Any": Any}
    known["RTensor"] = SimpleNamespace(localize=lambda tensors: tensors)
    exec(compile(ast.Module([method], []), str(path), "exec"), known)
    return asyncio.run(known[NAME](executor, trajectory, task, is_eval))


def padded(samples: list[Sample], version: int) -> dict[str, np.ndarray]:
    """Sequences of a task, padded on the right; −1 is the version of a token that nobody sampled."""
    rows = [sample.prompt + sample.response for sample in samples]
    masks = [[0] * len(sample.prompt) + sample.mask for sample in samples]

    def pad(values: list[list[int]]) -> np.ndarray:
        return np.array([one + [0] * (max(map(len, rows)) - len(one)) for one in values])

    return {
        "input_ids": pad(rows),
        "loss_mask": pad(masks),
        "attention_mask": pad([[1] * len(row) for row in rows]).astype(bool),
        "versions": pad([[version if keep else -1 for keep in mask] for mask in masks]),
        "rewards": np.array([sample.reward for sample in samples]),
    }


def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
    assert not skip_special_tokens
    return " ".join("<eos>" if i == EOS else f"w{i}" for i in ids)


def main(out: Path) -> None:
    folders = {False: str(out / "rollout"), True: str(out / "eval-rollout")}
    executor = SimpleNamespace(_get_dump_dir=folders.get, _get_tokenizer=lambda: SimpleNamespace(decode=decode))
    truth = []
    for version, groups in enumerate(STEPS):
        assert dumped(executor, padded(groups[0], version), 0, True)[0]
        for number, samples in enumerate(groups):
            assert dumped(executor, padded(samples, version), 2 * version + number, False)[0]
            for sample in samples:
                known = {"step": version, "group": 2 * version + number, "reward": sample.reward}
                known |= {"prompt_ids": sample.prompt, "response_ids": sample.response, "response_mask": sample.mask}
                truth.append(known)
    lines = ",\n".join(json.dumps(row) for row in truth)
    (out / "truth.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
