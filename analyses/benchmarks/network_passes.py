"""Count the positions that `measure` and `diagnose` send forward through the network, and their CPU seconds.

    python analyses/benchmarks/network_passes.py [ROLLOUTS]

ROLLOUTS come from the embedded policy, for example those of `gradscope demo`; by default its ten questions are sampled
here. A response scored alone counts with its own length, a micro-batch with its padding.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from torch import nn

import gradscope


def count(model: nn.Module, call: Callable[[], object]) -> tuple[object, int, float]:
    """Return the call's result, the number of positions sent forward during it, and its CPU seconds."""
    positions = 0

    def note(_module: nn.Module, _arguments: tuple[Any, ...], given: dict[str, Any], _output: Any) -> None:
        nonlocal positions
        positions += given["input_ids"].numel()

    handle, start = model.register_forward_hook(note, with_kwargs=True), time.process_time()
    try:
        result = call()
    finally:
        handle.remove()
    return result, positions, time.process_time() - start


def main(arguments: list[str]) -> None:
    policy = gradscope.load_policy("embedded")
    if arguments:
        batch = gradscope.read_rollouts(arguments[0], policy)
    else:
        batch = gradscope.sample(policy, task="knights-knaves-compact", questions=10, temperature=0.7, seed=0)
    once = int(batch.attention_mask.sum())
    table, positions, seconds = count(policy.model, lambda: gradscope.measure(policy, batch))
    print(f"measure: {positions / once:.2f} × {once:,} positions, {seconds:.1f} CPU seconds")
    _, positions, seconds = count(policy.model, lambda: gradscope.diagnose(policy, batch, table))
    print(f"diagnose: {positions / once:.2f} × {once:,} positions, {seconds:.1f} CPU seconds")


if __name__ == "__main__":
    main(sys.argv[1:])
