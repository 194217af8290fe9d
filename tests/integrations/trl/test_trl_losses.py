"""The callback beside TRL's trainers: what it measures is the trainer's own gradient, or it says that it is not."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.policies import save_checkpoint
from support.processes import launch
from support.progress import Listener
from support.refusals import refused
from support.tiers import every
from support.trl_runs import Recorder, import_trl, make_trainer, needs_trl, own_slopes, save_policy, train
from torch import nn

from gradscope.integrations.trl.callback import GradScopeCallback

pytestmark = needs_trl

SAME = 1e-4
"""Two programs' norms of one gradient in float32."""
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
INTERVALS = ["p0-25", "p25-50", "p50-75", "p75-100"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def rloo(checkpoint, folder, **settings):
    trl = import_trl()
    return make_trainer(checkpoint, folder, kind=trl.RLOOTrainer, config=trl.RLOOConfig, **settings)


def watch(trainer, *, every=1, **settings):
    callback = GradScopeCallback(trainer, every=every, micro_batch_size=3, **settings)
    trainer.add_callback(callback)
    return callback


def with_loss(kind, name, change):
    """A subclass whose method of that name hands the trainer's own result to `change`."""

    def method(self, *args, **keywords):
        return change(self, getattr(kind, name)(self, *args, **keywords))

    return type("Mine", (kind,), {name: method})


# ---- who is measured


@pytest.mark.parametrize("methods", [{"reweight_alpha": 0.3}, {"lopti_eta": 0.5}, {"weighting": "cispo"}])
def test_the_methods_are_refused_before_rloo(checkpoint, tmp_path, methods):
    from gradscope.integrations.trl import ReweightLoptiMixin

    trl = import_trl()
    kind = type("Mine", (ReweightLoptiMixin, trl.RLOOTrainer), {})
    with refused("RLOOTrainer"):
        make_trainer(checkpoint, tmp_path, kind=kind, config=trl.RLOOConfig, methods=methods)


def test_gmpo_behind_the_mixin_is_refused_its_methods(checkpoint, tmp_path):
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    from gradscope.integrations.trl import ReweightLoptiMixin

    kind = type("Mine", (ReweightLoptiMixin, GMPOTrainer), {})
    with refused("reweight_alpha", "GMPOTrainer"):
        make_trainer(checkpoint, tmp_path, kind=kind, config=GMPOConfig, methods={"reweight_alpha": 0.3})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("GRPOTrainer", "_compute_loss"),
        ("RLOOTrainer", "compute_loss"),
        ("GradScopeGRPOTrainer", "_compute_loss"),
        pytest.param("GradScopeGRPOTrainer", "compute_loss", marks=pytest.mark.all),
    ],
)
def test_a_loss_of_its_own_is_measured_by_its_slopes(checkpoint, tmp_path, kind, name):
    from gradscope.integrations.trl import GradScopeGRPOTrainer

    trl = import_trl()
    base = GradScopeGRPOTrainer if kind == "GradScopeGRPOTrainer" else getattr(trl, kind)
    config = trl.RLOOConfig if kind == "RLOOTrainer" else None
    doubled = with_loss(base, name, lambda _, loss: 2 * loss)
    rows = []
    for own in (base, doubled):
        trainer = make_trainer(checkpoint, tmp_path, kind=own, config=config, max_steps=1, **ACCUMULATED)
        callback = watch(trainer)
        train(trainer)
        rows += callback.rows
    assert [row["grad_norm_ratio"] for row in rows] == pytest.approx([1, 1], abs=SAME)
    for place in (*INTERVALS, "all"):
        assert rows[1][f"grad_norm/{place}"] == pytest.approx(2 * rows[0][f"grad_norm/{place}"], rel=SAME)


def test_a_loss_that_is_not_made_of_log_probabilities_is_not_measured_and_a_warning_says_so(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=1)
    trainer.compute_loss = lambda model, *_, **__: sum((p**2).sum() for p in model.parameters())
    callback = watch(trainer)
    with pytest.warns(UserWarning) as caught:
        train(trainer)
    assert any("gradscope" in str(w.message) for w in caught) and callback.rows == []


def test_a_subclass_that_changes_rewards_and_logging_is_measured(checkpoint, tmp_path):
    base = import_trl().GRPOTrainer
    kind = with_loss(base, "_calculate_rewards", lambda _, rewards: 3 * rewards + 1)
    trainer = make_trainer(checkpoint, tmp_path, kind=with_loss(kind, "log", lambda _, out: out), max_steps=1)
    callback = watch(trainer)
    train(trainer)
    assert callback.rows[0]["grad_norm_ratio"] == pytest.approx(1, abs=SAME)


def test_what_a_loss_has_beside_log_probabilities_is_left_out_and_shows_in_the_ratio(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=1, entropy_coef=1.0)
    callback = watch(trainer)
    with pytest.warns(UserWarning) as caught:
        train(trainer)
    said = [str(w.message) for w in caught if "gradscope" in str(w.message)]
    assert abs(callback.rows[0]["grad_norm_ratio"] - 1) > 0.01 and all("entropies" in words for words in said)


@pytest.mark.parametrize(("coef", "named"), [(None, 1), (0.0, 0)])  # GRPOConfig's None is the model's own
def test_the_experts_auxiliary_loss_that_the_models_config_switches_on_is_named(tmp_path, coef, named):
    folder = save_checkpoint(tmp_path / "policy", "qwen3_moe")
    trainer = make_trainer(folder, tmp_path, router_aux_loss_coef=coef, max_steps=1)
    watch(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(trainer)
    assert len([w for w in caught if "beside" in str(w.message) and "auxiliary" in str(w.message)]) == named


# ---- the norm beside the trainer's own

UNCORRECTED = {"use_bias_correction_kl": False}
RUNS = {
    "dapo": {"loss_type": "dapo", **ACCUMULATED},
    "weighting": {"kind": "ours", "methods": {"weighting": "cispo:eps_high=1.02"}, "loss_type": "bnpo", **UNCORRECTED},
    "lopti": {"kind": "ours", "methods": {"reweight_alpha": 0.3, "lopti_eta": 0.5}, **ACCUMULATED},
    "rloo": {"kind": "rloo", **ACCUMULATED},
    "clipped": {"max_grad_norm": 1e-3, "loss_type": "grpo"},
    "high first": {"kind": "ours", "methods": {"lopti_eta": 0.75, "lopti_order": "high-first"}},
    "unclipped": {"max_grad_norm": 0.0, "loss_type": "bnpo"},
    "top entropy": {"kind": "ours", "methods": {"weighting": "top-entropy:q=0.3"}, "beta": 0.0, **ACCUMULATED},
    "empty pass": {"kind": "ours", "methods": {"lopti_eta": 0}},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1, **ACCUMULATED},
    "sapo": {"loss_type": "sapo", "beta": 0.0},
    "vespo": {"loss_type": "vespo", **ACCUMULATED},
    "gmpo": {"kind": "gmpo", "epsilon": 0.4, "epsilon_high": 0.4, "beta": 0.0},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 0.01, **ACCUMULATED},
    "TRL's top entropy": {"top_entropy_quantile": 0.4, **ACCUMULATED},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, **UNCORRECTED},
    "luspo": {"loss_type": "luspo", **ACCUMULATED},
    "no passes": {"kind": "ours", "methods": {"reweight_alpha": 0.5}, "loss_type": "dr_grpo"},
}


def run(checkpoint, folder, *, kind=None, **settings):
    from gradscope.integrations.trl import GradScopeGRPOTrainer

    if kind == "rloo":
        return rloo(checkpoint, folder, **settings)
    if kind == "gmpo":
        from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

        return make_trainer(checkpoint, folder, kind=GMPOTrainer, config=GMPOConfig, **settings)
    return make_trainer(checkpoint, folder, kind=GradScopeGRPOTrainer if kind else None, **settings)


@pytest.mark.parametrize("name", every(3, RUNS))
def test_in_true_runs_the_ratio_is_one(checkpoint, tmp_path, name):
    settings = {"num_iterations": 2, "beta": 0.1, "move": 0.02, "max_steps": 4} | RUNS[name]
    trainer = run(checkpoint, tmp_path, **settings)
    callback = watch(trainer, every=3)
    train(trainer)
    assert [row["step"] for row in callback.rows] == [1, 4]  # step 4 is off-policy
    ratios = [row["grad_norm_ratio"] for row in callback.rows]
    assert ratios == pytest.approx([1, 1], abs=SAME)
    table = pd.read_parquet(callback.path)
    assert list(table["grad_norm_ratio"]) == ratios
    logged = [r["gradscope/grad_norm_ratio"] for r in trainer.state.log_history if "gradscope/grad_norm_ratio" in r]
    assert logged == pytest.approx(ratios)
    assert not {"compute_loss", "_get_grad_norm", "_get_per_token_logps_and_entropies"} & set(vars(trainer))


def test_lopti_between_the_edges_has_no_ratio(checkpoint, tmp_path):
    trainer = run(checkpoint, tmp_path, kind="ours", methods={"lopti_eta": 0.4}, max_steps=1)
    callback = watch(trainer)
    train(trainer)
    assert math.isnan(callback.rows[0]["grad_norm_ratio"])
    assert "gradscope/grad_norm_ratio" not in trainer.state.log_history[0]


def test_a_step_without_any_gradient_has_no_ratio_and_no_warning(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=1)
    trainer.reward_funcs = [lambda completion_ids, **_: [1.0] * len(completion_ids)]
    trainer._calculate_rewards = lambda inputs, *_: torch.ones(len(inputs), 1)
    callback = watch(trainer)
    train(trainer)
    assert callback.rows[0]["grad_norm/all"] == 0 and math.isnan(callback.rows[0]["grad_norm_ratio"])


def scale_gradient(factor):
    """The trainer's gradient made larger behind its loss."""

    def change(trainer, loss):
        if trainer.accelerator.sync_gradients:
            for parameter in trainer.model.parameters():
                parameter.grad *= factor
        return loss

    return with_loss(import_trl().GRPOTrainer, "training_step", change)


@pytest.mark.parametrize(("factor", "warns"), [(1.02, True), (0.98, True), (1.005, False)])
def test_another_gradient_than_the_measured_one_is_warned_of_with_both_norms(checkpoint, tmp_path, factor, warns):
    trainer = make_trainer(checkpoint, tmp_path, kind=scale_gradient(factor), max_steps=1, **ACCUMULATED)
    callback = watch(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = train(trainer)
    (row,), (logged, *_) = callback.rows, trainer.state.log_history
    assert row["grad_norm_ratio"] == pytest.approx(1 / factor, rel=SAME)
    said = [str(w.message) for w in caught if "gradscope" in str(w.message)]
    assert len(said) == warns and ("in 1 of them" in told) == warns
    for number in (row["grad_norm/all"], logged["grad_norm"]) if warns else ():
        assert f"{number:.6g}" in said[0]


@pytest.mark.all
def test_a_difference_is_warned_of_again_where_it_has_become_twice_as_large(checkpoint, tmp_path):
    factors = [1.03, 1.02, 1.05, 1.2, 1.2, 1.3]

    def change(trainer, loss):
        for parameter in trainer.model.parameters():
            parameter.grad *= factors[trainer.state.global_step]
        return loss

    kind = with_loss(import_trl().GRPOTrainer, "training_step", change)
    trainer = make_trainer(checkpoint, tmp_path, kind=kind, max_steps=6, learning_rate=1e-4)
    callback = watch(trainer)
    with pytest.warns(UserWarning) as caught:
        train(trainer)
    assert [re.search(r"step (\d)", str(w.message))[1] for w in caught if "gradscope" in str(w.message)] == ["1", "4"]
    assert [row["grad_norm_ratio"] for row in callback.rows] == pytest.approx([1 / f for f in factors], rel=SAME)


def test_dropout_is_named_where_it_makes_the_difference(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=1)
    layer = trainer.model.model.layers[0].mlp
    layer.down_proj = nn.Sequential(nn.Dropout(0.5), layer.down_proj)
    callback = watch(trainer)
    with pytest.warns(UserWarning):
        train(trainer)
    assert abs(callback.rows[0]["grad_norm_ratio"] - 1) > 0.01


# ---- RLOO


def test_rloos_bins_add_up_to_its_own_gradient_and_each_is_its_tokens_part(checkpoint, tmp_path):
    settings = {"num_iterations": 2, "epsilon": 0.05, "epsilon_high": 0.1, "beta": 0.1, "move": 0.02, "max_steps": 2}
    settings["learning_rate"] = 1e-3
    trainer = rloo(checkpoint, tmp_path, **settings, **ACCUMULATED)
    callback, recorder = watch(trainer, cosines=True), Recorder(trainer)
    train(trainer)
    (before, step), (_, row) = recorder.steps, callback.rows
    ratio = 0
    trainer.model.load_state_dict(step["weights"], strict=False)
    trainer.model.train()
    parts = [{name: 0.0 for name in step["gradient"]} for _ in INTERVALS]
    for inputs in step["window"]:
        logprobs, slopes = own_slopes(trainer, inputs)
        log_ratio = (logprobs.detach() * inputs["completion_mask"]).sum(1) - inputs["old_logps"]
        ratio = max(ratio, float(log_ratio.abs().max()))
        place = (4 * logprobs.detach().exp()).long().clamp(max=3)
        for a, part in enumerate(parts):
            objective = (logprobs * slopes * (place == a)).sum() / len(step["window"])
            found = torch.autograd.grad(objective, list(trainer.model.parameters()), retain_graph=True)
            for name, gradient in zip(part, found, strict=True):
                part[name] = part[name] + gradient
    assert ratio > 0.1  # some responses are clipped
    vectors = torch.stack([torch.cat([g.flatten() for g in part.values()]).double() for part in parts])
    whole = torch.cat([g.flatten() for g in step["gradient"].values()]).double()
    assert torch.allclose(vectors.sum(0), whole, atol=SAME * float(whole.abs().max()))
    for name, vector in zip([*INTERVALS, "all"], [*vectors, whole], strict=True):
        assert row[f"grad_norm/{name}"] == pytest.approx(float(vector.norm()), rel=SAME)
    for name, vector in zip(INTERVALS, vectors, strict=True):
        assert row[f"grad_share/{name}"] == pytest.approx(float(vector @ whole / (whole @ whole)), rel=1e-3, abs=SAME)
    assert before is not step


def test_rloos_ratio_is_of_the_trainers_own_log_probabilities(checkpoint, tmp_path):
    """Of a response in another precision than the trainer's the sum would be far from its own."""
    trainer = rloo(checkpoint, tmp_path, max_steps=1)
    callback = watch(trainer)
    own = type(trainer)._get_per_token_logps_and_entropies

    def rough(*args, **keywords):
        found = own(trainer, *args, **keywords)
        return found[0] - 0.05, *found[1:]  # by 0.5 nats in ten tokens, and so was π_old

    trainer._get_per_token_logps_and_entropies = rough
    train(trainer)
    assert callback.rows[0]["grad_norm_ratio"] == pytest.approx(1, abs=SAME)


@pytest.mark.parametrize("adapters", [False, True])
def test_norms_by_module_group_are_those_of_the_trainers_own_gradient(checkpoint, tmp_path, adapters):
    words = {"q_proj": "attention_q", "k_proj": "attention_k", "v_proj": "attention_v", "o_proj": "attention_o"}
    words |= {"mlp": "MLP", "norm": "norms", "embed": "embedding_and_head"}
    peft = None
    if adapters:
        words, lora = {"lora_A": "adapter_A", "lora_B": "adapter_B"}, pytest.importorskip("peft").LoraConfig
        peft = lora(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(checkpoint, tmp_path, peft=peft, max_steps=2, **ACCUMULATED)
    callback, recorder = watch(trainer), Recorder(trainer)
    train(trainer)
    for row, step in zip(callback.rows, recorder.steps, strict=True):
        squares = dict.fromkeys(words.values(), 0.0)
        for name, gradient in step["gradient"].items():
            (group,) = (told for word, told in words.items() if word in name)
            squares[group] += float(gradient.double().square().sum())
        found = {name.removeprefix("module_norm/"): v for name, v in row.items() if name.startswith("module_norm/")}
        wanted = {group: math.sqrt(square) for group, square in squares.items()}
        assert found == pytest.approx(wanted, rel=SAME, abs=SAME * row["grad_norm/all"])


# ---- several processes


TOGETHER = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.trl_runs import import_trl, make_trainer
from gradscope.integrations.trl.callback import GradScopeCallback
out, kind, empty = Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "empty"
trl, rank = import_trl(), int(os.environ["RANK"])
sizes = {"per_device_train_batch_size": 4, "max_steps": 1, "ddp_backend": "gloo", "move": 0.02}
if kind == "rloo":
    sizes |= {"kind": trl.RLOOTrainer, "config": trl.RLOOConfig}
trainer = make_trainer(out / "policy", out / "run", **sizes)
own = trainer._generate_and_score_completions
def generate(batch):
    found = own(batch)
    if empty and rank == 1:
        found["completion_mask"] *= 0
    return found
trainer._generate_and_score_completions = generate
callback = GradScopeCallback(trainer, micro_batch_size=3)
trainer.add_callback(callback)
trainer.train()
(out / f"{rank}.json").write_text(json.dumps([trainer.accelerator.num_processes, callback.rows]))
"""


@pytest.mark.all
@pytest.mark.parametrize(("kind", "kept"), [("grpo", 80), ("grpo", 40), ("rloo", 80)])
def test_several_processes_measure_the_gradient_of_all_their_responses(tmp_path, kind, kept):
    save_policy(tmp_path / "policy")
    tests = Path(__file__).parents[2]
    (code := tmp_path / "together.py").write_text(TOGETHER)
    for ended in launch(code, tests, tmp_path, kind, "whole" if kept == 80 else "empty"):
        assert ended.status == 0, ended.stderr
    (processes, (first,)), (_, (second,)) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert processes == 2 and first["num_tokens"] == kept
    assert first["grad_norm_ratio"] == pytest.approx(1, abs=SAME)
    assert sum(first[f"token_share/{name}"] for name in INTERVALS) == pytest.approx(1)
    assert {n: v for n, v in first.items() if n != "seconds"} == {n: v for n, v in second.items() if n != "seconds"}
    assert list(pd.read_parquet(tmp_path / "run" / "gradscope" / "metrics.parquet")["step"]) == [1]


# ---- what it says while it measures


def test_it_says_what_it_measures_and_reports_its_stages(checkpoint, tmp_path, capsys):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=4)
    watch(trainer, every=2, progress=(told := Listener()))
    train(trainer)
    said = [line for line in capsys.readouterr().err.splitlines() if "gradscope" in line]
    assert [re.findall(r"\d+", line)[:4] for line in said] == [[str(step), "80", "8", "4"] for step in (1, 3)]
    assert [stage.name for stage in told.stages if not stage.within] == [
        *("step 1", "scoring"),
        *("step 3", "scoring"),
    ]
    assert [(s.total, s.done) for s in told.stages if s.name == "gradients"] == [(3, 3)] * 2  # eight, three at once
    silent = make_trainer(checkpoint, tmp_path / "silent", max_steps=1)
    watch(silent, progress=False)
    train(silent)
    assert "gradscope" not in capsys.readouterr().err
