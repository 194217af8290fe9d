"""Public functions name the argument that is of another type than they take, before they do anything."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pandas as pd
import pytest
import torch
from support.policies import make_policy
from torch import nn

import gradscope
from gradscope import objective, plots, theory, updates
from gradscope.diagnosis import Diagnosis, DiagnosisSettings, Scope
from gradscope.errors import InputError
from gradscope.gradients import MeasureSettings
from gradscope.resampling import Supply
from gradscope.rollouts.batch import Response, collate
from gradscope.sampling import SamplingSettings, evaluate
from gradscope.tasks import get_task
from gradscope.trainer import TrainConfig, get_preset

DOORS = {
    objective: "grpo_advantages reinforce_pp_advantages reweight lopti_split policy_loss token_weights make_weighting",
    theory: "theory_report regress_norms add_drivers logit_grad_norm logit_grad_bounds",
    updates: "influence influence_table moved_against right_direction_shares similarity",
    plots: " ".join(name for name in plots.__all__ if name.startswith("plot_")),
}


def public() -> Iterator[Callable[..., Any]]:
    for name in gradscope.__all__:
        if inspect.isfunction(found := getattr(gradscope, name)):
            yield found
    for door, names in DOORS.items():
        yield from (getattr(door, name) for name in names.split())
    yield from (evaluate, get_preset)


@pytest.fixture(scope="module")
def pool() -> list[Any]:
    """A value of every type that a public function requires."""
    batch, table = collate([Response([1], [2])]), pd.DataFrame()
    made = Diagnosis({}, Scope((), Supply(0, 0), table))
    tensors = [torch.zeros(1, 1), torch.zeros(1), torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.long)]
    values = ["embedded", Path("x"), 1, 0.5, [], table, batch, make_policy("gpt2"), nn.Linear(1, 1), made, *tensors]
    report = object.__new__(inspect.unwrap(gradscope.write_report).__globals__["Report"])
    return [*values, get_task("arithmetic"), TrainConfig(), report, None]


@pytest.mark.parametrize("function", list(public()), ids=lambda function: function.__name__)
def test_an_argument_of_another_type_is_named(function, pool):
    from gradscope.errors import _fits

    hints, parameters = get_type_hints(inspect.unwrap(function)), inspect.signature(function).parameters.values()
    own = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = {p.name: next(v for v in pool if _fits(v, hints[p.name])) for p in own if p.default is p.empty}
    wrong, tried = object(), 0
    for parameter in own:
        if not _fits(wrong, hints[parameter.name]):
            with pytest.raises((TypeError, InputError), match=rf"\b{parameter.name}\b"):
                function(**needed | {parameter.name: wrong})
            tried += 1
    assert tried


@pytest.mark.parametrize(
    "call",
    [
        lambda: gradscope.measure("embedded", "rollouts.jsonl", temprature=0.7),
        lambda: gradscope.diagnose("embedded", "rollouts.jsonl", temprature=0.7),
        lambda: gradscope.read_rollouts("rollouts.jsonl", temprature=0.7),
        lambda: gradscope.sample("embedded", ["1+1="], temprature=0.7),
    ],
)
def test_an_unknown_keyword_is_named_and_the_nearest(call):
    with pytest.raises(TypeError, match="temprature"):
        call()


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (gradscope.sample, SamplingSettings),
        (gradscope.measure, MeasureSettings),
        (gradscope.diagnose, DiagnosisSettings),
    ],
)
def test_the_keywords_are_the_fields_of_the_settings(function, settings):
    *_, (last, parameter) = inspect.signature(function).parameters.items()
    assert parameter.kind is parameter.VAR_KEYWORD
    (keywords,) = get_args(get_type_hints(inspect.unwrap(function))[last])
    fields = {name: field.type for name, field in settings.__dataclass_fields__.items()}
    if "loss" in fields:
        fields["weighting"] = "str | None"  # the loss's
    assert {name: hint.__forward_arg__ for name, hint in keywords.__annotations__.items()} == fields


def test_paths_are_taken_in_the_place_of_a_policy_and_its_rollouts(tmp_path):
    policy = gradscope.load_policy("embedded")
    batch = gradscope.sample(policy, task="knights-knaves-compact", questions=2, n=2, max_new_tokens=4, seed=1)
    assert len(batch) == 4 and batch.old_logprobs is not None and batch.rewards is not None
    assert batch[:2].num_tokens == batch[[0, 1]].num_tokens == batch[0].num_tokens + batch[1].num_tokens
    file = gradscope.rollouts.write_rollouts(tmp_path / "rollouts.jsonl", batch)
    for name, values in gradscope.read_rollouts(file, policy).tensors().items():
        torch.testing.assert_close(values, getattr(batch, name), rtol=0, atol=0, equal_nan=True)
    table = gradscope.measure("embedded", file)
    assert table.equals(gradscope.measure(policy, batch))
    with gradscope.capture_gradients(policy, ["model.layers.0"]) as seen:
        policy.model(input_ids=batch.input_ids).logits.sum().backward()
    assert seen["model.layers.0"].shape[0] == 4
    policy.model.zero_grad()
