"""How fast a machine is: as a pilot found it or, of a GPU that is not at hand, by its datasheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradscope.errors import InputError

Number = int | float

WITHIN = 1.5
"""Factor within which seconds that a pilot predicts were the measured ones."""


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second, by part of a job."""

    machine: str
    """In words, with the source of the numbers."""
    by_part: Mapping[str, Number]
    """FLOP/s; bytes/s of what only moves them; of an optimizer's step, parameters/s."""

    def seconds(self, work: Mapping[str, Number]) -> dict[str, float]:
        """How long each part takes."""
        return {part: amount / self.by_part[part] for part, amount in work.items()}


@dataclass(frozen=True)
class Gpu:
    """A GPU by its datasheet."""

    name: str
    flops: dict[str, Number]
    """Dense FLOP/s by precision."""
    bandwidth: Number
    """Bytes/s of its memory."""
    memory: Number
    """Bytes."""


UTILISATION, BANDWIDTH = 0.4, 0.7
"""Assumed: shares of the datasheet's FLOP/s and bytes/s that eager PyTorch reaches on a large network. (With exact
token gradients in float32 an H200 reached .40 to .62, along the graph .17 to .30: figures/benchmark_gpu.csv.)"""
FAST_UTILISATION = {"tf32": 0.1, "bfloat16": 0.04}
"""Shares that the fast mode's products reach, since all else stays in float32: chosen among .08 to .21 and .03 to .09
that an H200 reached at 0.5 to 3 B, less with smaller policies."""
OPTIMIZER_BYTES = 28
"""AdamW reads weight, gradient and moments of each parameter and writes all but the gradient, in float32."""

_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12}
_AMPERE = {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12}
GPUS = {
    "h200": Gpu("NVIDIA H200 (SXM)", _HOPPER, 4.8e12, 141e9),
    "h100": Gpu("NVIDIA H100 (SXM)", _HOPPER, 3.35e12, 80e9),
    "a100": Gpu("NVIDIA A100 (80 GB, SXM)", _AMPERE, 2.04e12, 80e9),
}
"""NVIDIA's datasheets, without sparsity; float32 without tensor cores."""

BYTES_OF_A_WEIGHT = {"bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4}


def gpu_rates(name: str, precision: str, parts: Mapping[str, Number | None], *, fast: bool = False) -> Rates:
    """Rates of a GPU that is not at hand.

    parts: the names of FLOPs, each with how many rows its products have, as in decoding, whose products wait for the
    weights; None: thousands. "compacting the cache" is of bytes, "optimizer" of parameters. fast: for the fast
    mode, which reaches less of the datasheet.
    Raises InputError for a GPU that is not in GPUS, and for a precision that its datasheet does not give.
    """
    gpu = GPUS.get(name)
    if gpu is None:
        raise InputError(f"no GPU is known as {name!r}; give one of {', '.join(GPUS)}")
    if precision not in gpu.flops:
        raise InputError(f"{gpu.name}'s speed in {precision} is not known here; give one of {', '.join(gpu.flops)}")
    utilisation = FAST_UTILISATION[precision] if fast else UTILISATION
    most, moved = utilisation * gpu.flops[precision], BANDWIDTH * gpu.bandwidth
    # Two FLOPs a row for each weight that is read.
    by_part = {
        part: most if rows is None else min(most, 2 * rows * moved / BYTES_OF_A_WEIGHT[precision])
        for part, rows in parts.items()
    }
    return Rates(
        f"{gpu.name} in {precision}, assumed {utilisation:.0%} of {gpu.flops[precision] / 1e12:,.0f} TFLOP/s and "
        f"{BANDWIDTH:.0%} of {gpu.bandwidth / 1e12:.2f} TB/s",
        by_part | {"compacting the cache": moved, "optimizer": moved / OPTIMIZER_BYTES},
    )


def describe_seconds(seconds: float) -> str:
    """In the unit that reads well.

    >>> describe_seconds(42.0), describe_seconds(7200.0)
    ('42 s', '2 h')
    """
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"
