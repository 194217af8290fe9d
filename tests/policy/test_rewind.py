"""A model that is trained, rearranged and spoilt, and then compared with what it was, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.gradients import snapshot
from torch import Tensor, nn

from gradscope.policy import restoring


class Strange(nn.Module):
    """A tied weight, a frozen one, a NaN, a −0, whole numbers, statistics in buffers, an expanded one and none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.frozen = nn.Parameter(torch.tensor([float("nan"), -0.0, 1.0, 2.0]), requires_grad=False)
        self.whole = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("expanded", torch.tensor([1.0, 2.0]).expand(3, 2))
        self.register_buffer("nothing", None)
        self.register_buffer("table", torch.tensor([-0.0, float("nan")]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.embed(ids))) + self.frozen.nan_to_num())


@pytest.fixture
def model() -> Strange:
    torch.manual_seed(0)
    model = Strange().eval()
    model.norm.train()
    model.embed.weight.grad = torch.full((5, 4), 7.0)
    return model


def train(model: Strange) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()


def thaw_and_spoil(model: Strange) -> None:
    with torch.no_grad():
        model.frozen.requires_grad_(True)
        model.frozen.copy_(torch.tensor([1.0, 0.0, float("nan"), float("inf")]))
        model.whole += 1
        model.table.copy_(torch.tensor([0.0, 3.0]))


def put_other_tensors_in_place(model: Strange) -> None:
    model.embed.weight = nn.Parameter(torch.zeros(2, 4))
    model.norm.running_mean = torch.ones(4)
    model.table = None
    model.register_buffer("another", torch.ones(2))
    model.register_parameter("more", nn.Parameter(torch.ones(2)))
    model.head.weight.data = torch.ones(5, 4, dtype=torch.float64)


def draw(model: Strange) -> None:
    random.random()
    np.random.rand()
    torch.rand(2)


CHANGES: list[Callable[[Strange], None]] = [train, thaw_and_spoil, put_other_tensors_in_place, draw]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_whatever_happens_inside_everything_is_as_it_was(model, change, fails):
    before = snapshot(model)
    try:
        with restoring(model):
            start = snapshot(model)
            change(model)
            assert snapshot(model) != start
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert snapshot(model) == before


def test_gradients_start_out_as_none_and_come_back_as_the_same_objects(model):
    gradient = model.embed.weight.grad
    with restoring(model):
        assert all(p.grad is None for p in model.parameters())
        train(model)
    assert model.embed.weight.grad is gradient
    assert (gradient == 7.0).all()
    assert model.norm.weight.grad is None


def test_one_inside_another_goes_back_to_the_state_between(model):
    with restoring(model):
        train(model)
        between = snapshot(model)
        with restoring(model):
            train(model)
        assert snapshot(model) == between


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_has_its_weights_and_its_random_state_back(model):
    model.cuda()
    before, state = snapshot(model), torch.cuda.get_rng_state_all()
    with restoring(model):
        torch.rand(3, device="cuda")
        with torch.no_grad():
            model.embed.weight.add_(1)
    assert snapshot(model) == before
    assert all(torch.equal(a, b) for a, b in zip(torch.cuda.get_rng_state_all(), state, strict=True))
