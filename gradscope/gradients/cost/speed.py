"""How fast a device is at what training and measuring do: measured here in about a second, or known of a GPU.

A piece of work takes the sum of what its parts take: FLOPs of products, bytes that elementwise passes read and write,
and a fixed time for each operation. That is a model of one stream of operations that do not overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.errors import InputError

Number = int | float


@dataclass(frozen=True)
class Work:
    """What something takes, by the kind of work; adds up, and can be done several times."""

    products: Number = 0
    """FLOPs of matrix products with as many rows as tokens go through at once."""
    thin: Number = 0
    """FLOPs of products with a row per response: decoding."""
    attention: Number = 0
    """FLOPs of attention's products, over all pairs of positions."""
    moved: Number = 0
    """Bytes that elementwise passes over a block's arrays read and write."""
    logits: Number = 0
    """The same over arrays of logits, which are larger."""
    operations: Number = 0
    """Calls of an operation, whatever it does."""

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def __mul__(self, times: Number) -> Work:
        return Work(*(times * getattr(self, f.name) for f in fields(Work)))

    @property
    def flops(self) -> Number:
        """FLOPs of all products."""
        return self.products + self.thin + self.attention


def total(works: Iterable[Work]) -> Work:
    """Their sum."""
    return sum(works, start=Work())


@dataclass(frozen=True)
class Speeds:
    """What a device does in a second, on arrays of the sizes of one job."""

    device: str
    """In words, with the source of the numbers."""
    products: Number
    """FLOP/s."""
    thin: Number
    """FLOP/s."""
    attention: Number
    """FLOP/s."""
    moved: Number
    """Bytes/s."""
    logits: Number
    """Bytes/s."""
    operation: Number
    """Seconds of an operation beside its work."""

    def seconds(self, work: Work) -> float:
        """How long the work takes, one operation after the other."""
        rates = ("products", "thin", "attention", "moved", "logits")
        return sum(getattr(work, name) / getattr(self, name) for name in rates) + work.operations * self.operation


@dataclass(frozen=True)
class Gpu:
    """A GPU by its datasheet, and how much of that an eager PyTorch program is assumed to reach."""

    name: str
    flops: dict[str, Number]
    """Dense FLOP/s of the datasheet by precision."""
    bandwidth: Number
    """Bytes/s of its memory, by the datasheet."""
    memory: Number
    """Bytes, by the datasheet."""


ASSUMED_PRODUCTS, ASSUMED_ATTENTION, ASSUMED_BANDWIDTH, ASSUMED_OPERATION = 0.6, 0.15, 0.7, 3e-6
"""Assumed, not measured: shares of the datasheet's numbers that products of thousands of rows, attention's smaller ones
and elementwise passes reach, and the seconds that Python needs to launch an operation."""

_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12}
_AMPERE = {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12}
GPUS = {
    "h200": Gpu("NVIDIA H200 (SXM)", _HOPPER, 4.8e12, 141e9),
    "h100": Gpu("NVIDIA H100 (SXM)", _HOPPER, 3.35e12, 80e9),
    "a100": Gpu("NVIDIA A100 (80 GB, SXM)", _AMPERE, 2.04e12, 80e9),
}
"""NVIDIA's datasheets, without sparsity; float32 without tensor cores."""

BYTES_OF_A_WEIGHT = {"bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4}


def gpu_speeds(name: str, precision: str, *, thin_rows: Number = 1) -> Speeds:
    """Speeds of a GPU that is not at hand. thin_rows: responses decoded together.

    Raises InputError for a GPU that is not in GPUS, and for a precision that its datasheet does not give.
    """
    gpu = GPUS.get(name)
    if gpu is None:
        raise InputError(f"no GPU is known as {name!r}; give one of {', '.join(GPUS)}")
    if precision not in gpu.flops:
        raise InputError(f"{gpu.name}'s speed in {precision} is not known here; give one of {', '.join(gpu.flops)}")
    peak, bandwidth = gpu.flops[precision], ASSUMED_BANDWIDTH * gpu.bandwidth
    # A product with few rows waits for its weights: two FLOPs a row for each of them.
    thin = min(ASSUMED_PRODUCTS * peak, 2 * thin_rows * bandwidth / BYTES_OF_A_WEIGHT[precision])
    return Speeds(
        f"{gpu.name} in {precision}, assumed {ASSUMED_PRODUCTS:.0%} of {peak / 1e12:,.0f} TFLOP/s and "
        f"{ASSUMED_BANDWIDTH:.0%} of {gpu.bandwidth / 1e12:.2f} TB/s",
        products=ASSUMED_PRODUCTS * peak,
        thin=thin,
        attention=ASSUMED_ATTENTION * peak,
        moved=bandwidth,
        logits=bandwidth / 3,  # passes over logits are counted as a cache makes them, which these are too large for
        operation=ASSUMED_OPERATION,
    )


@dataclass(frozen=True)
class JobSizes:
    """Sizes of a job's arrays, as far as speeds depend on them."""

    rows: int
    """Tokens (× positions) that go through a layer at once."""
    thin_rows: int
    """Responses decoded together."""
    hidden: int
    head_dim: int
    heads: int
    length: int
    """Positions that attend to each other."""
    vocab: int
    logit_rows: int
    """Tokens whose logits lie there at once."""


LARGEST = JobSizes(
    rows=2048, thin_rows=256, hidden=512, head_dim=128, heads=8, length=512, vocab=2**18, logit_rows=4096
)
MOST_LOGITS = 2**24
"""Larger arrays than these are taken to be as fast, so that measuring takes about a second on a slow core. These logits
are more than the 32 MB from which an allocator on Linux asks for fresh pages each time, which is several times as slow
as memory that it has."""


MIXED = 1.6
"""A pass in a whole network, over arrays of many sizes, takes so much longer than the probe's: fitted to measured times
of training small policies on a CPU (analyses/benchmarks/plan_time.py)."""
MIXED_WITH_KEPT_MEMORY = 1.2
"""The same where memory that was freed is kept for the next array, as when token gradients are measured."""


def measure_speeds(
    sizes: JobSizes,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
    mixed: Number = MIXED,
) -> Speeds:
    """Measure this machine on arrays like the job's, with as many threads as torch has now.

    dtype: of the arrays; multiply: how the job's products are made of them, which may round them first; mixed: how much
    longer an elementwise pass takes in the job than here.
    The rate of elementwise passes is that of a whole block, forward and backward, beyond its products: alone, a pass
    over arrays that lie in a cache already is several times as fast.
    """
    at_most = {f.name: min(getattr(sizes, f.name), getattr(LARGEST, f.name)) for f in fields(JobSizes)}
    s = JobSizes(**{name: max(1, size) for name, size in at_most.items()})
    make = _Arrays(device, dtype)
    width = max(64, s.hidden)
    blocks = _Blocks(make, s.rows, min(width, 256))
    plain = _rate(device, make.product(torch.matmul, s.rows, width, 3 * width))
    products, thin = (_rate(device, make.product(multiply, rows, width, 3 * width)) for rows in (s.rows, s.thin_rows))
    beside = max(_time(device, blocks.run) - blocks.flops / plain, 0.1 * blocks.flops / plain)
    tiny = _Blocks(make, 1, 8)
    many = max(1, min(s.heads * max(1, s.rows // s.length), 2**24 // s.length**2))
    scores = _rate(device, make.product(multiply, s.length, s.length, s.head_dim, batch=many))
    logits = make.numbers(min(s.logit_rows, max(1, MOST_LOGITS // s.vocab)), s.vocab)
    return Speeds(
        f"this machine ({device.type}, {torch.get_num_threads()} threads, {str(dtype).removeprefix('torch.')})",
        products=products,
        thin=thin,
        attention=scores,
        moved=blocks.moved / beside / mixed,
        logits=LOGIT_PROBE_PASSES * logits.nbytes / _time(device, lambda: (logits - 1).exp().sum(1)),
        operation=_time(device, tiny.run) / (tiny.depth * BLOCK_OPERATIONS),
    )


LOGIT_PROBE_PASSES = 5
"""Arrays of logits that the probe reads and writes: two in and two out, and the sum's."""

BLOCK_PASSES, BLOCK_OPERATIONS = 161, 84
"""What each block of `_Blocks.run` touches: arrays as wide as the stream that it reads and writes beside its products,
and operations; counted by a dispatch mode (tests/gradients/test_machine_speed.py)."""


class _Arrays:
    """Makes random arrays on a device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.device, self.dtype = device, dtype

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def product(
        self, multiply: Callable[[Tensor, Tensor], Tensor], rows: int, inner: int, columns: int, *, batch: int = 1
    ) -> tuple[Callable[[], object], Number]:
        """A product and its FLOPs."""
        left, right = self.numbers(batch, rows, inner), self.numbers(batch, inner, columns)
        if batch == 1:
            left, right = left[0], right[0]
        return lambda: multiply(left, right), 2 * batch * rows * inner * columns


class _Blocks:
    """Decoder blocks without attention's scores, on random weights: what they cost beside their products.

    Several, so that as much lies in memory as in a network that is trained.
    """

    depth = 4

    def __init__(self, make: _Arrays, rows: int, width: int) -> None:
        square = [make.numbers(width, width) / width**0.5 for _ in range(4)]
        wide = [make.numbers(3 * width, width) / width**0.5 for _ in range(2)]
        self.weights = [*square, *wide, make.numbers(width, 3 * width) / (3 * width) ** 0.5]
        self.scale = make.numbers(width)
        self.stream, self.seed = make.numbers(rows, width).requires_grad_(True), make.numbers(rows, width)
        # Weights are not trained: a product in the forward pass, and one in the backward pass.
        self.flops = self.depth * 2 * 2 * rows * sum(weight.numel() for weight in self.weights)
        self.moved = self.depth * BLOCK_PASSES * self.stream.nbytes

    def run(self) -> None:
        with torch.enable_grad():
            stream = self.stream
            for _ in range(self.depth):
                stream = self._forward(stream)
            torch.autograd.grad(stream, self.stream, self.seed)

    def _forward(self, stream: Tensor) -> Tensor:
        query, key, value, out, gate, up, down = self.weights
        inputs = self._norm(stream)
        query, key = (self._rotate(F.linear(inputs, weight)) for weight in (query, key))
        stream = stream + F.linear(query + key + F.linear(inputs, value), out)
        inputs = self._norm(stream)
        return stream + F.linear(F.silu(F.linear(inputs, gate)) * F.linear(inputs, up), down)

    def _norm(self, stream: Tensor) -> Tensor:
        return stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-6) * self.scale

    def _rotate(self, values: Tensor) -> Tensor:
        first, second = values.chunk(2, dim=-1)
        return values * self.scale + torch.cat((-second, first), dim=-1) * self.scale


def _rate(device: torch.device, product: tuple[Callable[[], object], Number]) -> float:
    """FLOP/s."""
    call, flops = product
    return flops / _time(device, call)


def _time(device: torch.device, call: Callable[[], object], *, budget: Number = 0.1) -> float:
    """Seconds of a call: the median of as many as fit the budget, three to thirty, after one that warms up.

    Of the process's time on a CPU with one thread, which others on the machine do not lengthen; else of the clock.
    """
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    seconds, spent = [], 0.0
    call()
    while len(seconds) < 3 or (spent < budget and len(seconds) < 30):
        _wait(device)
        start = clock()
        call()
        _wait(device)
        seconds.append(clock() - start)
        spent += seconds[-1]
    return max(median(seconds), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_seconds(seconds: float) -> str:
    """In the unit that reads well.

    >>> describe_seconds(42.0), describe_seconds(7200.0)
    ('42 s', '2 h')
    """
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"
