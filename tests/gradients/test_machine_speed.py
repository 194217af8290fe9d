"""Speeds and work: a model that adds up, probes that count what they do, GPUs by their datasheets."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradscope.errors import InputError
from gradscope.gradients import JobSizes, Speeds, Work, gpu_speeds, measure_speeds
from gradscope.gradients.cost import speed as machine_speed
from gradscope.gradients.cost.speed import GPUS, total

SMALL = JobSizes(rows=64, thin_rows=4, hidden=64, head_dim=16, heads=2, length=32, vocab=128, logit_rows=8)
SPEEDS = Speeds("a machine", products=2.0, thin=4.0, attention=5.0, moved=10.0, logits=20.0, operation=0.5)
VIEWS = {"view", "t", "transpose", "expand", "slice", "split", "detach", "alias", "unsqueeze", "_unsafe_view"}
PRODUCTS = {"mm", "addmm", "bmm"}


class Counted(TorchDispatchMode):
    """Operations that compute, and the numbers that elementwise ones read and write."""

    def __init__(self):
        super().__init__()
        self.operations, self.numbers = Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.operations[name] += 1
            if name not in PRODUCTS:
                self.numbers += sum(distinct(t) for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor))
        return out


def distinct(tensor):
    """Numbers in memory; an axis that is only repeated counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def test_seconds_are_the_sum_over_the_kinds_of_work():
    assert SPEEDS.seconds(Work()) == 0
    work = Work(products=6, thin=8, attention=10, moved=30, logits=80, operations=4)
    assert SPEEDS.seconds(work) == 3 + 2 + 2 + 3 + 4 + 2
    assert SPEEDS.seconds(work * 3) == pytest.approx(3 * SPEEDS.seconds(work))
    assert total([work, work * 2]) == work * 3
    assert work.flops == 24


def test_the_probe_reads_writes_and_calls_what_it_is_said_to():
    blocks = machine_speed._Blocks(machine_speed._Arrays(torch.device("cpu"), torch.float32), 256, 64)
    with Counted() as counted:
        blocks.run()
    per_block = counted.numbers / blocks.depth / blocks.stream.numel()
    # What is [rows, 1] or [width] counts a little, and the first block's input needs one addition less.
    assert per_block == pytest.approx(machine_speed.BLOCK_PASSES, rel=0.03)
    assert counted.operations.total() / blocks.depth == pytest.approx(machine_speed.BLOCK_OPERATIONS, rel=0.03)
    assert sum(counted.operations[name] for name in PRODUCTS) == 2 * 7 * blocks.depth


def test_a_machine_is_measured_in_positive_numbers_in_any_precision():
    for dtype in (torch.float32, torch.bfloat16):
        speeds = measure_speeds(SMALL, device=torch.device("cpu"), dtype=dtype)
        assert all(value > 0 for name, value in vars(speeds).items() if name != "device")
        assert str(dtype).removeprefix("torch.") in speeds.device


def test_products_are_timed_as_the_job_makes_them(monkeypatch):
    """Every product but the one that the blocks' own are taken off by: those are plain."""
    seconds = {"plain": 1.0, "rounded": 0.5}

    def rounded(left, right):
        return (left.bfloat16() @ right.bfloat16()).float()

    def timed(device, call):
        with Counted() as counted:
            call()
        return seconds["rounded" if counted.operations["_to_copy"] else "plain"]

    monkeypatch.setattr(machine_speed, "_time", timed)
    plain, fast = (
        measure_speeds(SMALL, device=torch.device("cpu"), multiply=multiply) for multiply in (torch.matmul, rounded)
    )
    for name in ("products", "thin", "attention"):
        assert getattr(fast, name) == 2 * getattr(plain, name)
    assert (fast.moved, fast.logits, fast.operation) == (plain.moved, plain.logits, plain.operation)


def test_a_huge_job_is_measured_on_arrays_of_a_limited_size(monkeypatch):
    sizes, make = [], machine_speed._Arrays.numbers

    def counting(self, *shape):
        sizes.append(torch.Size(shape).numel())
        return make(self, *shape)

    monkeypatch.setattr(machine_speed._Arrays, "numbers", counting)
    monkeypatch.setattr(machine_speed, "_time", lambda device, call: 1.0)
    huge = JobSizes(10**6, 10**4, 10**4, 128, 64, 10**5, 150_000, 10**5)
    measure_speeds(huge, device=torch.device("cpu"))
    assert max(sizes) <= machine_speed.MOST_LOGITS == 2**24


def test_a_gpu_decodes_few_rows_at_the_speed_of_its_memory_and_many_at_that_of_its_products():
    one, two, many = (gpu_speeds("h200", "bfloat16", thin_rows=rows) for rows in (1, 2, 10**5))
    # Two FLOPs for each weight of two bytes.
    assert one.thin == one.moved and two.thin == 2 * one.thin
    assert many.thin == many.products < GPUS["h200"].flops["bfloat16"]


def test_a_gpu_or_precision_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(InputError, match="no GPU is known as 'tpu'; give one of h200, h100, a100"):
        gpu_speeds("tpu", "bfloat16")
    with pytest.raises(InputError, match="in float64 is not known here; give one of bfloat16, float16, tf32, float32"):
        gpu_speeds("h200", "float64")
