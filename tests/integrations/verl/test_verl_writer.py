"""What is written of verl's batches, by stand-ins for its trainers; test_verl_rollouts.py runs verl's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.cli import run
from support.policies import make_batch, make_policy, save_checkpoint
from support.refusals import refused
from support.tiers import every
from support.verl_stand_ins import TEMPERATURE, Config, as_padded, make_config, make_trainer, update

from gradscope import load_policy
from gradscope.gradients import TokenJacobian
from gradscope.integrations.verl.batch_writer import (
    WriterSettings,
    read_settings,
    response_divisors,
    verl_loss,
)
from gradscope.objective import LossSettings, batch_weights
from gradscope.rollouts import read_dump


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("run") / "global_step_1", "qwen2", sharpness=5.0)


@pytest.fixture(scope="module")
def truth(checkpoint):
    """Six responses to three prompts, near the policy, with factors for another sampler and tokens of a tool."""
    batch = make_batch(make_policy("qwen2", sharpness=5.0)).at_temperature(TEMPERATURE)
    with torch.no_grad():
        own = TokenJacobian(load_policy(checkpoint), batch).statistics.logprob.float().cpu()
    generator, rows = torch.Generator().manual_seed(0), []
    for row, (start, length) in enumerate(zip(batch.response_start.tolist(), lengths_of(batch), strict=True)):
        known = {"prompt": batch.input_ids[row, batch.attention_mask[row]][:start]}
        known |= {"ids": batch.input_ids[row, start : start + length]}
        known |= {"mask": batch.response_mask[row, start : start + length].long(), "uid": f"p{row // 2}"}
        noise = torch.rand(4, length, generator=generator)
        known |= {
            "advantages": torch.randn(1, generator=generator).expand(length),
            "rollout_is_weights": noise[0] + 0.5,
        }
        logprobs = own[row, start : start + length]
        for place, name in enumerate(("old_log_probs", "ref_log_prob", "rollout_log_probs"), 1):
            known[name] = logprobs - 0.02 * noise[place]
        known["scores"] = torch.zeros(length).index_fill(0, torch.tensor([length - 1]), float(row % 2))
        rows.append(known)
    return rows


def lengths_of(batch):
    ends = batch.attention_mask.sum(1) - batch.response_start
    return ends.tolist()


def as_stored(rows, monkeypatch):
    """The metadata of a batch in TransferQueue, of which another process is the store."""
    names = {
        "prompts": "prompt",
        "responses": "ids",
        "response_mask": "mask",
        "loss_mask": "mask",
        "rm_scores": "scores",
    }
    names |= {n: n for n in ("advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs", "rollout_is_weights")}
    names |= {name: name for name in ("teacher_logprobs", "teacher_ids") if name in rows[0]}
    stored = {n: torch.nested.as_nested_tensor([r[o] for r in rows], layout=torch.jagged) for n, o in names.items()}
    stored["uid"] = np.array([r["uid"] for r in rows], dtype=object)

    def get(keys, partition_id, select_fields):
        assert keys == "these" and partition_id == "train"
        return {name: stored[name] for name in select_fields if name in stored}

    monkeypatch.setitem(sys.modules, "transfer_queue", SimpleNamespace(kv_batch_get=get))
    tags = [{"is_padding": row["uid"] == "pad"} for row in rows]
    return SimpleNamespace(keys="these", partition_id="train", tags=tags)


def give(kind, rows, monkeypatch):
    return as_padded(rows) if kind == "padded" else as_stored(rows, monkeypatch)


KINDS = ["padded", "stored"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_batch(truth, tmp_path, monkeypatch, kind):
    padding = truth[0] | {"uid": "pad", "mask": torch.zeros_like(truth[0]["mask"])}
    rows = [*truth, padding] * 2 if kind == "stored" else truth
    trainer, writer = make_trainer(make_config(tmp_path, ppo_mini_batch_size=len(rows) // 2), kind, text=True)
    update(trainer, give(kind, rows, monkeypatch))
    trainer._shutdown_dump_executor()
    assert trainer.ended and writer.steps == [1] and writer.seconds > 0
    file = tmp_path / "gradscope" / "rollouts" / "step_000001.parquet"
    dump = read_dump(file.parent)
    batch, real = dump.batch, [row for row in rows if row["uid"] != "pad"]
    assert len(batch) == len(real)
    assert LossSettings.from_log(dump.loss) == LossSettings(0.3, 0.25, 3.0, 0.02)
    for row, own in enumerate(real):
        start, n, kept = len(own["prompt"]), len(own["ids"]), own["mask"].bool()
        assert torch.equal(batch.input_ids[row, : start + n], torch.cat([own["prompt"], own["ids"]]))
        assert torch.equal(batch.response_mask[row, start : start + n], kept)
        assert batch.rewards[row] == own["scores"].sum()
        columns = {
            "old_logprobs": "old_log_probs",
            "ref_logprobs": "ref_log_prob",
            "sampler_logprobs": "rollout_log_probs",
        }
        for column, name in columns.items():
            assert torch.equal(getattr(batch, column)[row, start : start + n][kept], own[name][kept])
        wanted = own["advantages"] * own["rollout_is_weights"]
        assert torch.allclose(batch.advantages[row, start : start + n][kept], wanted[kept], rtol=1e-6)
    groups = [own["uid"] for own in real]
    same = torch.tensor([[a == b for a in groups] for b in groups])
    assert torch.equal(batch.group_ids[:, None] == batch.group_ids, same)
    assert (batch.temperature == np.float32(TEMPERATURE)).all() and (batch.steps == 1).all()
    written = pq.read_table(file).to_pylist()
    assert {row["grad_norm"] for row in written} == {0.25}
    decode = trainer.tokenizer.decode
    assert all(row["response"] == decode(row["response_ids"]) for row in written)
    assert all(row["prompt"] == decode(row["prompt_ids"]) for row in written)


@pytest.mark.parametrize("kind", KINDS)
def test_a_teachers_log_probabilities_are_the_tokens_own(truth, tmp_path, monkeypatch, kind):
    """verl has the one about a token at the place before it."""
    draw, rows = torch.Generator().manual_seed(0), []
    for own in truth:
        length = len(own["prompt"]) + len(own["ids"])
        rows.append(own | {"teacher_logprobs": -torch.rand(length, 1, generator=draw)})
    trainer, _ = make_trainer(make_config(tmp_path, distillation={}), kind)
    update(trainer, give(kind, rows, monkeypatch))
    trainer._shutdown_dump_executor()
    dump = read_dump(tmp_path / "gradscope" / "rollouts")
    for row, own in enumerate(rows):
        start, n, kept = len(own["prompt"]), len(own["ids"]), own["mask"].bool()
        wanted = torch.stack([own["teacher_logprobs"][start + at - 1, 0] for at in range(n)])
        assert torch.equal(dump.batch.teacher_logprobs[row, start : start + n][kept], wanted[kept])
    assert LossSettings.from_log(dump.loss).is_whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_over_candidates_is_written_as_them_and_without_advantages(truth, tmp_path, monkeypatch, kind):
    """As verl keeps the teacher's likeliest, at the place before the token that they might have been."""
    draw, rows = torch.Generator().manual_seed(0), []
    for own in truth:
        length = len(own["prompt"]) + len(own["ids"])
        best = torch.randn(length, 20, generator=draw).log_softmax(1).topk(3)
        rows.append(own | {"teacher_logprobs": best.values, "teacher_ids": best.indices.int()})
    loss = {"loss_mode": "forward_kl_topk", "use_policy_gradient": False}
    trainer, _ = make_trainer(make_config(tmp_path, distillation=loss), kind)
    update(trainer, give(kind, rows, monkeypatch))
    trainer._shutdown_dump_executor()
    dump = read_dump(tmp_path / "gradscope" / "rollouts")
    batch = dump.batch
    assert dump.loss is batch.advantages is batch.rewards is batch.teacher_logprobs is None
    for row, own in enumerate(rows):
        start, n, kept = len(own["prompt"]), len(own["ids"]), own["mask"].bool()
        for found, name in zip(batch.candidates, ("teacher_ids", "teacher_logprobs"), strict=True):
            assert torch.equal(found[row, start : start + n][kept].to(own[name]), own[name][start - 1 : -1][kept])


@pytest.mark.parametrize("kind", every(2, KINDS))
@pytest.mark.parametrize("known", [True, False])
def test_rows_say_their_process_and_micro_batch_where_these_are_known(truth, tmp_path, monkeypatch, kind, known):
    """Twelve responses to two processes, each in micro-batches of two; the last two are padding in a store."""
    padding = [own | {"uid": "pad"} for own in truth[:2]] if kind == "stored" else truth[:2]
    config = make_config(tmp_path, ppo_mini_batch_size=6, use_dynamic_bsz=not known)
    trainer, writer = make_trainer(config, kind)
    trainer.actor_rollout_wg._dispatch_info = {"actor": [0, 0, 1, 1]}  # two ranks each
    update(trainer, give(kind, [*truth, *truth[:4], *padding], monkeypatch))
    trainer._shutdown_dump_executor()
    rows = pq.read_table(next(writer.folder.iterdir())).to_pylist()
    count = 10 if kind == "stored" else 12
    assert [row["process"] for row in rows] == [0] * 6 + [1] * (count - 6)
    wanted = [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2][:count]
    assert [row.get("micro_batch") for row in rows] == (wanted if known else [None] * count)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_whose_norm_stands_out_is_written(truth, tmp_path, monkeypatch, kind):
    norms = [9.0, 1.0, 1.2, 0.9, 1.1, 1.0, 3.5, 1.0, float("nan"), 3.4, 5.0]
    trainer, writer = make_trainer(make_config(tmp_path), kind, every=None, spike=3.0, spikes=3)
    for step, trainer.norm in enumerate(norms, 1):
        trainer.global_steps = step
        update(trainer, give(kind, truth, monkeypatch))
    trainer._shutdown_dump_executor()
    assert writer.steps == [7, 9, 10]  # above 3 × 1.1, 1 or 1.05; then there have been three
    assert [int(path.stem[5:]) for path in sorted(writer.folder.iterdir())] == writer.steps


@pytest.mark.all
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", KINDS)
def test_the_log_is_diagnosed_without_a_flag(truth, checkpoint, tmp_path, monkeypatch, kind):
    trainer, _ = make_trainer(make_config(tmp_path), kind)
    for trainer.global_steps in (1, 2):
        update(trainer, give(kind, truth, monkeypatch))
    trainer._shutdown_dump_executor()
    log, out = tmp_path / "gradscope" / "rollouts", tmp_path / "report"
    run("diagnose", checkpoint, "--rollouts", log, "--out", out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["settings"]["loss"] == manifest["rollouts"]["loss"] and not manifest["rollouts"]["other_step"]
    assert manifest["rollouts"]["loss"]["kl_coef"] == 0.02
    kinds = {note.kind for note in read_dump(log, step=2).notes}
    assert not kinds & {"temperature", "on-policy", "unknown-values"}


def test_steps_that_are_not_due_are_not_copied_and_a_new_run_removes_later_files(truth, tmp_path):
    folder = tmp_path / "rollouts"
    for first, number, wanted in ((1, 2, [1, 3, 5]), (4, 1, [1, 3, 4, 5]), (1, 3, [1, 4])):
        trainer, writer = make_trainer(make_config(tmp_path), "padded", folder=folder, every=number)
        for trainer.global_steps in range(first, 6):
            update(trainer, as_padded(truth))
        trainer._shutdown_dump_executor()
        assert [int(path.stem[5:]) for path in sorted(folder.glob("*.parquet"))] == wanted
        assert writer.steps == [step for step in range(first, 6) if (step - 1) % number == 0]


def test_updates_of_one_step_are_one_file_of_their_mean_loss(truth, tmp_path, monkeypatch):
    trainer, writer = make_trainer(make_config(tmp_path, ppo_mini_batch_size=1), "stored")
    trainer.parameter_sync_step = 3
    for prompt in range(3):
        update(trainer, as_stored(truth[2 * prompt : 2 * prompt + 2], monkeypatch))
        assert writer.steps == ([] if prompt < 2 else [1])
    trainer._shutdown_dump_executor()
    batch = read_dump(tmp_path / "gradscope" / "rollouts").batch
    tokens = batch.response_mask.sum(1).float()
    of_prompt = tokens.view(3, 2).sum(1).repeat_interleave(2)
    assert torch.allclose(batch.loss_scales, batch.num_tokens / (3 * of_prompt), rtol=1e-6)


@pytest.mark.parametrize(("kind", "image"), [*product(KINDS, (False, True))])
def test_prompts_with_images_are_not_written_and_a_warning_says_so(truth, tmp_path, monkeypatch, kind, image):
    trainer, writer = make_trainer(make_config(tmp_path), kind)
    trainer.processor, given = object(), np.array([{"pixel_values": 0}, {}] if image else [{}, {}], dtype=object)
    if kind == "padded":
        batch = as_padded(truth)
        batch.non_tensor_batch["multi_modal_inputs"] = given
    else:
        batch = as_stored(truth, monkeypatch)
        own = sys.modules["transfer_queue"].kv_batch_get
        get = lambda keys, partition_id, select_fields: (  # noqa: E731
            {"multi_modal_inputs": given}
            if select_fields == ["multi_modal_inputs"]
            else own(keys, partition_id, select_fields)
        )
        monkeypatch.setitem(sys.modules, "transfer_queue", SimpleNamespace(kv_batch_get=get))
    if image:
        with pytest.warns(UserWarning, match="images"):
            update(trainer, batch)
    else:
        update(trainer, batch)
    trainer._shutdown_dump_executor()
    assert writer.steps == ([] if image else [1])


# ---- how the loss adds up


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize("processes", [1, 2])
def test_divisors_are_those_of_a_loop_over_mini_batches(mode, processes):
    kept = torch.tensor([3.0, 5.0, 0.0, 4.0, 7.0, 1.0, 2.0, 6.0])
    counted = kept + torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 3.0, 0.0, 0.0])  # with what was rejected
    actor = Config(loss_agg_mode=mode, loss_scale_factor=10)
    found = response_divisors(actor, kept, counted, mini_batch=4, processes=processes)
    own = 8 // processes
    ranks = [range(rank * own, (rank + 1) * own) for rank in range(processes)]
    each = 4 // processes
    for step in range(2):
        rows = [row for rank in ranks for row in rank[step * each : (step + 1) * each]]
        for row in rows:
            divisor = {
                "token-mean": sum(float(counted[r]) for r in rows),
                "token-sum": 1.0,
                "seq-mean-token-sum": 4.0,
                "seq-mean-token-mean": 4.0 * max(float(kept[row]), 0.25),
                "seq-mean-token-sum-norm": 40.0,
            }[mode]
            assert float(found[row]) == 2 * divisor  # the mean of two mini-batches' losses


# ---- who is refused


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policy": {"loss_mode": "gspo"}}, "gspo"),
        ({"policy": {"loss_mode": "gradscope", "lopti_eta": 0.5}}, "lopti_eta"),
        ({"policy": {"loss_mode": "gradscope", "weighting": "cispo"}}, "weighting"),
        ({"policy": {"loss_mode": "bypass_mode", "rollout_correction": Config(loss_type="reinforce")}}, "reinforce"),
        ({"correction": {"bypass_mode": True, "rollout_rs": "token_k1"}}, "rollout_rs"),
        ({"entropy_coeff": 0.001}, "entropy_coeff"),
        ({"kl_loss_type": "abs"}, "abs"),
        ({"kl_loss_type": "full"}, "full"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_scale_factor"),
        ({"shuffle": True, "ppo_mini_batch_size": 1}, "shuffle"),
        ({"distillation": {"loss_mode": "forward_kl_topk"}}, "forward_kl_topk"),
        (
            {"distillation": {"loss_mode": "forward_kl_topk", "use_policy_gradient": False, "use_task_rewards": True}},
            "forward_kl_topk",
        ),
        ({"distillation": {}, "correction": {"rollout_is": "token"}}, "rollout_is"),
        ({"clip_ratio_high": -1.0}, "clip_ratio_high"),
    ],
)
def test_a_loss_that_rows_cannot_say_is_refused_by_name(tmp_path, settings, named):
    with refused(named):
        verl_loss(make_config(tmp_path, **settings))


def test_losses_that_rows_can_say(tmp_path):
    plain = LossSettings(0.3, 0.25, 3.0, 0.02)
    assert verl_loss(make_config(tmp_path)) == plain
    bypass = {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_rs": None}
    assert verl_loss(make_config(tmp_path, correction=bypass, kl_loss_type="k3")) == plain
    without = make_config(tmp_path, use_kl_loss=False, kl_loss_type="abs")
    assert verl_loss(without) == LossSettings(0.3, 0.25, 3.0, 0.0)
    weightings = {
        "opd:estimator=k1,policy_gradient=1,eps_low=0.1,eps_high=0.2,dual=3.0": {},
        "opd:estimator=k3,policy_gradient=0,clamp=10.0": {"loss_mode": "low_var_kl", "use_policy_gradient": False},
        "opd:estimator=abs,policy_gradient=0,clamp=2.0,coef=0.5,reward=term": {
            **{"loss_mode": "abs", "use_policy_gradient": False, "use_task_rewards": True, "loss_max_clamp": 2.0}
        },
    }
    for name, given in weightings.items():
        found = verl_loss(make_config(tmp_path, distillation=given))
        assert found == replace(plain, weighting=name) and found.weighed.reward == (
            "term" if "term" in name else "none"
        )
    reweighted = make_config(tmp_path, policy={"loss_mode": "gradscope", "reweight_alpha": 0.3, "lopti_eta": None})
    assert verl_loss(reweighted) == LossSettings(0.3, 0.25, 3.0, 0.02, 0.3)


def kl_penalty(logprob, ref_logprob, kind):
    """verl's penalty (verl/trainer/ppo/core_algos.py): where the name ends with +, its gradient is k2's."""
    apart, squared = ref_logprob - logprob, 0.5 * (logprob - ref_logprob).square()
    if kind.endswith("+"):
        return squared - squared.detach() + kl_penalty(logprob, ref_logprob, kind[:-1]).detach()
    return {"kl": -apart, "k1": -apart, "mse": squared, "k2": squared}.get(kind, apart.exp() - apart - 1)


@pytest.mark.parametrize("kind", ["kl", "k1", "mse", "k2", "low_var_kl", "k3", "k1+", "low_var_kl+"])
def test_the_kl_penaltys_gradient_is_verls(tmp_path, kind):
    batch = replace(make_batch(make_policy("qwen2")), loss_scales=None)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, *batch.input_ids.shape, dtype=torch.float64, generator=generator)
    logprobs, ref = (-noise.square()).unbind()
    batch = replace(batch, old_logprobs=logprobs, ref_logprobs=ref, advantages=torch.ones_like(logprobs))
    own = logprobs.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad((0.02 * kl_penalty(own, ref, kind))[batch.response_mask].sum(), own)
    settings = verl_loss(make_config(tmp_path, kl_loss_type=kind))
    found = batch_weights(logprobs, batch, settings, num_tokens=1).kl
    torch.testing.assert_close(found, -slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GRADSCOPE_ROLLOUTS_EVERY", "0"),
        ("GRADSCOPE_ROLLOUTS_EVERY", "ten"),
        ("GRADSCOPE_ROLLOUTS_EVERY", "none"),
        ("GRADSCOPE_ROLLOUTS_TEXT", "yes"),
        ("GRADSCOPE_ROLLOUTS_SPIKE", "1"),
        ("GRADSCOPE_ROLLOUTS_SPIKE", "high"),
        ("GRADSCOPE_ROLLOUTS_SPIKES", "0"),
        ("GRADSCOPE_ROLLOUTS_EVRY", "2"),
        ("GRADSCOPE_ROLLOUTS", __file__),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(name, value):
    with refused(name):
        read_settings({"HOME": "/", name: value})


def test_settings_are_environment_variables(tmp_path):
    assert read_settings({"PATH": ""}) == WriterSettings()
    given = {"GRADSCOPE_ROLLOUTS": str(tmp_path), "GRADSCOPE_ROLLOUTS_EVERY": "5", "GRADSCOPE_ROLLOUTS_TEXT": "1"}
    assert read_settings(given) == WriterSettings(tmp_path, 5, True)
    given |= {"GRADSCOPE_ROLLOUTS_EVERY": "none", "GRADSCOPE_ROLLOUTS_SPIKE": "2.5"}
    given["GRADSCOPE_ROLLOUTS_SPIKES"] = "3"
    assert read_settings(given) == WriterSettings(tmp_path, None, True, 2.5, 3)


def test_the_tutorial_names_what_the_modules_need_beside_verls_own_packages():
    """What gradscope requires and neither verl nor what it requires does (verl 0.9.1's wheel)."""
    named = re.search(r"^pip install (?!-)(.+)$", Path("docs/tutorials/verl.md").read_text(), re.MULTILINE)[1].split()
    unknown = {"scipy", "matplotlib", "seaborn", "tyro", "jaxtyping", "beartype", "lazy_loader", "math_verify"}
    assert {*named} <= unknown
    modules = [f"gradscope.integrations.verl.{name}" for name in ("batch_writer", "methods")]
    absent = dict.fromkeys(unknown - {*named})
    script = f"import importlib, sys; sys.modules |= {absent}; [importlib.import_module(name) for name in {modules}]"
    subprocess.run([sys.executable, "-c", script], check=True)
