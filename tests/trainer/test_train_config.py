"""TrainConfig: what makes no sense is refused in one line, and config.json gives the same run back."""

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from support.refusals import refused

from gradscope.objective import PAPER, LossSettings
from gradscope.trainer import TrainConfig

NAN, INF = float("nan"), float("inf")


def test_the_defaults_are_the_papers_for_knights_and_knaves():
    config = TrainConfig()
    assert (config.questions_per_step, config.group_size, config.num_responses) == (64, 8, 512)
    assert (config.mini_batch_size, config.micro_batch_size, config.max_new_tokens) == (256, 32, 4096)
    assert (config.temperature, config.learning_rate, config.max_grad_norm) == (0.7, 1e-6, 1.0)
    assert config.loss == PAPER == LossSettings(0.2, 0.24, 10.0, 0.001, None)
    assert (config.reweight_alpha, config.lopti_eta, config.mask_probs, config.control) == (None, None, None, None)


COUNTS = ("epochs", "questions_per_step", "max_new_tokens", "mini_batch_size", "micro_batch_size", "lora_rank")
COUNTS += ("sampling_batch_size", "save_every", "keep_checkpoints")
REFUSED = {
    **{name: [0] for name in COUNTS},
    **{name: [-0.1, 1.1, NAN] for name in ("clip_ratio_low", "reweight_alpha", "lopti_eta")},
    "steps": [0, -1],
    "group_size": [0, 1, 10**20],
    "questions_per_step": [0, 10**20],
    "micro_batch_size": [0, 10**20, 2**31],
    "lora_rank": [0, 2**31],
    "lora_alpha": [0, NAN, 1e300],
    "warmup_steps": [-1],
    "weight_decay": [-0.1, NAN, INF],
    "seed": [-1, 2**64],
    "temperature": [0.0, -1.0, NAN, INF],
    "learning_rate": [0, -1e-6, NAN, INF, 1e39, 2_000_000],
    "max_grad_norm": [0, NAN, INF],
    "kl_coef": [-0.1, NAN, INF, 1e300],
    "clip_ratio_high": [-0.1, NAN, 1e300],
    "clip_ratio_c": [1.0, NAN, 1e300],
    "mask_probs": [(0.5, 0.5), (0.5, 0.2), (-0.1, 0.5), (0.5, 1.1), (NAN, 1.0), (0.0, NAN)],
    "vllm_memory": [0.0, 1.1, NAN],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_means_nothing_is_refused_in_one_line_that_names_field_and_value(name):
    for value in REFUSED[name]:
        # alpha, eta: the words of the function that refuses them.
        with refused(name.rpartition("_")[2], value):
            TrainConfig(**{name: value})


def test_a_step_of_too_many_responses_and_a_mask_of_every_token_are_refused():
    assert TrainConfig(questions_per_step=10_000, group_size=1000).num_responses == 10_000_000
    with refused("10,000,000"):
        TrainConfig(questions_per_step=10_001, group_size=1000)
    assert TrainConfig(mask_probs=(0.001, 1.0)).mask_probs == (0.001, 1.0)
    with refused("mask_probs"):
        TrainConfig(mask_probs=(0.0, 1.0))


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("steps", 1.5, "int | None"),
        ("steps", "3", "int | None"),
        ("steps", True, "int | None"),
        ("data", "foo", "tuple[str, ...]"),
        ("people", [2], "tuple[int, ...]"),
        ("people", (2.0,), "tuple[int, ...]"),
        ("mask_probs", ("low", "high"), "tuple[float, float] | None"),
        ("learning_rate", "fast", "float"),
        ("learning_rate", None, "float"),
        ("clip_ratio_c", False, "float | None"),
        ("save_rollouts", 1, "bool"),
        ("model", 3, "str"),
        ("device", 0, "str | None"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_type_that_is_wanted(name, value, wanted):
    config = TrainConfig()
    object.__setattr__(config, name, value)
    with refused(name, repr(value), type(value).__name__, wanted):
        config.__post_init__()


def test_whole_numbers_for_floats_and_a_path_for_the_model_are_taken():
    config = TrainConfig(learning_rate=1)
    for name, value in (("model", Path("runs") / "policy"), ("mask_probs", (0, 0.5)), ("vllm_memory", 1)):
        object.__setattr__(config, name, value)
    config.__post_init__()
    assert config.model == "runs/policy"


def test_a_group_of_one_is_enough_for_reinforce_pp_alone():
    assert TrainConfig(algorithm="reinforce++", group_size=1).num_responses == 64
    with refused("group_size"):
        TrainConfig(group_size=1)


@pytest.mark.parametrize(
    ("control", "needed", "value"),
    [
        ("random-split", "lopti_eta", 0.5),
        ("permuted-weights", "reweight_alpha", 0.3),
        ("matched-norm", "reweight_alpha", 0.3),
    ],
)
def test_a_control_is_refused_without_the_method_that_it_is_matched_to(control, needed, value):
    assert TrainConfig(control=control, **{needed: value}).control == control
    other = {"lopti_eta": "reweight_alpha", "reweight_alpha": "lopti_eta"}[needed]
    for settings in ({}, {other: 0.5}):
        with refused(needed):
            TrainConfig(control=control, **settings)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig(
            data=("a/*.parquet", "b.parquet"),
            people=(2, 3),
            steps=7,
            mask_probs=(0.25, 0.5),
            clip_ratio_c=None,
            reweight_alpha=0.1,
            control="matched-norm",
            learning_rate=3e-7,
            trackers=(),
        ),
    ],
)
def test_a_config_goes_through_json_and_comes_back_equal(config):
    stored = json.loads(json.dumps(asdict(config), allow_nan=False))
    assert stored.keys() == {field.name for field in fields(config)}
    read = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    assert TrainConfig(**read) == config


def test_a_method_stands_for_the_flags_that_say_the_same():
    for method, flags in (
        ("reweight:alpha=0.1", {"reweight_alpha": 0.1}),
        ("lopti:eta=0.4", {"lopti_eta": 0.4}),
        ("mask:low=0.25,high=0.5", {"mask_probs": (0.25, 0.5)}),
        ("random-split", {"lopti_eta": 0.5, "control": "random-split"}),
        ("permuted-weights", {"reweight_alpha": 0.3, "control": "permuted-weights"}),
        ("matched-norm:alpha=0.2", {"reweight_alpha": 0.2, "control": "matched-norm"}),
        ("grpo", {}),
    ):
        one, other = TrainConfig(method=method), TrainConfig(**flags)
        assert (one.rule, one.loss, one.weighting) == (other.rule, other.loss, None), method
    assert str(TrainConfig(method="cispo:eps_high=4").weighting) == "cispo:eps_high=4"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"method": "cispoo"}, "cispo"),
        ({"method": "sapo:tau=1"}, "tau_pos"),
        ({"method": "reweight:alpha=3"}, "alpha"),
        ({"method": "cispo", "lopti_eta": 0.5}, "lopti_eta"),
        ({"method": "tis", "old_logprobs": "sampler"}, "old_logprobs"),
    ],
)
def test_a_method_that_is_none_or_one_too_many_is_refused(settings, named):
    with refused(named):
        TrainConfig(**settings)
