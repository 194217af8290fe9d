"""Native rows of what TRL trained on, and the process beside the trainer that writes them.

The process reads from its standard input: what holds for all steps, then a `TrainedStep` at a time. It touches no
device, and where the trainer has gone it writes what it was given and ends. Nothing else of the package is imported:
to load torch would take longer than to write hundreds of steps.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

Part = Mapping[str, np.ndarray]
"""A micro-batch under TRL's names, its tensors as arrays, and `loss_scale` [B]."""

PER_TOKEN = {
    "old_logprobs": "old_per_token_logps",
    "ref_logprobs": "ref_per_token_logps",
    "sampler_logprobs": "sampling_per_token_logps",
    "sampler_correction": "importance_sampling_ratio",
}
"""Native column → TRL's tensor, [B, C], or [B, 1] of whole responses."""
TAKEN = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "rewards"),
    *PER_TOKEN.values(),
)
"""Tensors that rows are made of, TRL's and the writer's `rewards` [B]; the last five, and tool_mask, are not in every
run."""


@dataclass(frozen=True)
class TrainedStep:
    """One optimizer step's micro-batches, and what all its rows share."""

    path: str
    """File to write."""
    parts: list[Part]
    shared: dict[str, Any]
    """Further columns, a value each: step, temperature, grad_norm (None: not known)."""


def native_rows(step: TrainedStep, tokenizer: Any = None) -> Iterator[dict[str, Any]]:
    """Yield a row per response: of the prompt and the response what their masks keep.

    tokenizer: to write their text beside the ids; None: no text.
    """
    for part in step.parts:
        for row, seen in enumerate(part["completion_mask"] > 0):
            prompt, response = part["prompt_ids"][row][part["prompt_mask"][row] > 0], part["completion_ids"][row][seen]
            advantage = part["advantages"][row]
            told = {"prompt_ids": prompt, "response_ids": response}
            told["advantage"] = advantage[seen] if advantage.ndim else float(advantage)
            if "rewards" in part:
                told["reward"] = float(part["rewards"][row])
            if "tool_mask" in part:
                told["response_mask"] = part["tool_mask"][row][seen] > 0
            for name, own in PER_TOKEN.items():
                if own in part:
                    told[name] = np.broadcast_to(part[own][row], seen.shape)[seen]
            if tokenizer is not None:
                told |= {"prompt": tokenizer.decode(prompt), "response": tokenizer.decode(response)}
            yield told | {"loss_scale": float(part["loss_scale"][row])} | step.shared


def write_step(path: Path, rows: list[dict[str, Any]], metadata: Mapping[bytes, str]) -> None:
    """Write rows as `write_rollouts` does; columns are those of the first."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    table = pa.table({name: [row.get(name) for row in rows] for name in rows[0]})
    pq.write_table(table.replace_schema_metadata(metadata), partial)
    os.replace(partial, path)


def write_steps(source: BinaryIO) -> None:
    """Write a file per step until the source ends, or breaks off."""
    try:
        told = pickle.load(source)
        while True:
            step = pickle.load(source)
            write_step(Path(step.path), list(native_rows(step, told["tokenizer"])), told["metadata"])
    except (EOFError, pickle.UnpicklingError):  # the trainer has ended, perhaps in the middle of a step
        return


def main() -> None:
    """Write what comes, giving way to the trainer, and print the seconds of CPU time that it took."""
    if hasattr(os, "nice"):
        os.nice(10)
    write_steps(sys.stdin.buffer)
    print(time.process_time())
