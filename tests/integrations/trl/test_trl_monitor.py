"""The monitor beside TRL: training is the same bit for bit, and its numbers are those of a loop over the own logits."""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.processes import launch
from support.refusals import refused
from support.tiers import every
from support.trl_runs import (
    TEMPERATURE,
    Recorder,
    import_trl,
    make_trainer,
    needs_trl,
    own_slopes,
    save_policy,
    train,
    weights,
)
from transformers import AutoModelForCausalLM, TrainerCallback

from gradscope.diagnosis import Verdict
from gradscope.integrations.trl import GradScopeGRPOTrainer, TokenMonitor

pytestmark = needs_trl

INTERVALS = ["p0-25", "p25-50", "p50-75", "p75-100"]
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
OFF_POLICY = {"num_iterations": 2, "move": 0.02, "epsilon": 0.05, "epsilon_high": 0.1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def monitor(trainer, **settings):
    callback = TokenMonitor(trainer, **settings)
    trainer.add_callback(callback)
    return callback


def make(checkpoint, folder, *, kind=None, **settings):
    trl = import_trl()
    if kind == "rloo":
        settings |= {"kind": trl.RLOOTrainer, "config": trl.RLOOConfig}
    elif kind == "ours":
        settings["kind"] = GradScopeGRPOTrainer
    elif kind == "gmpo":
        from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

        settings |= {"kind": GMPOTrainer, "config": GMPOConfig}
    return make_trainer(checkpoint, folder, **settings)


bonus_is_left_out = pytest.mark.filterwarnings("ignore:gradscope. the loss has a gradient through the entropies")

# ---- training is as without

UNCHANGED = {
    "accumulated": {"num_iterations": 2, "beta": 0.1, **ACCUMULATED},
    "entropy bonus": {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
    "rloo": {"kind": "rloo", **ACCUMULATED},
    "lopti": {"kind": "ours", "methods": {"lopti_eta": 0.5}},
    "bfloat16": {"bf16": True},
}


@bonus_is_left_out
@pytest.mark.parametrize("name", every(2, UNCHANGED))
def test_four_steps_end_with_the_same_weights_bit_for_bit(checkpoint, tmp_path, name):
    from trl.trainer import utils

    ends, head = [], utils._ChunkedLogProbFunction
    for folder in ("without", "with"):
        trainer = make(checkpoint, tmp_path / folder, max_steps=4, **UNCHANGED[name])
        callback = monitor(trainer) if folder == "with" else None
        train(trainer)
        ends.append(weights(trainer.model))
        assert not {"compute_loss", "_get_per_token_logps_and_entropies"} & set(vars(trainer))
    assert all(torch.equal(ends[0][name], weight) for name, weight in ends[1].items())
    assert [row["step"] for row in callback.rows] == list(range(1, 5))
    assert callback.cpu_seconds > 0 and callback.seconds > 0
    assert utils._ChunkedLogProbFunction is head


# ---- what the numbers are

KINDS = ("token_share", "logit_grad_share", "clipped_share", "masked_share", "mismatch", "entropy")
LOSSES = {
    "dapo": {**OFF_POLICY, **ACCUMULATED},
    "dapo, two steps of a generation": {"steps_per_generation": 2, **OFF_POLICY},
    "grpo, KL": {"loss_type": "grpo", "beta": 0.1, **OFF_POLICY, **ACCUMULATED},
    "bnpo, delta": {"loss_type": "bnpo", "delta": 1.05, **OFF_POLICY, **ACCUMULATED},
    "dr_grpo": {"loss_type": "dr_grpo", **OFF_POLICY, **ACCUMULATED},
    "luspo, sequences": {"loss_type": "luspo", "importance_sampling_level": "sequence", **OFF_POLICY},
    "cispo": {"loss_type": "cispo", **OFF_POLICY | {"epsilon_high": 1.1}},
    "sapo": {"loss_type": "sapo", **OFF_POLICY},
    "vespo": {"loss_type": "vespo", **OFF_POLICY},
    "gspo": {"importance_sampling_level": "sequence", **OFF_POLICY, **ACCUMULATED},
    "top entropy": {"top_entropy_quantile": 0.4, **OFF_POLICY, **ACCUMULATED},
    "off-policy mask": {"off_policy_mask_threshold": 0.05, **OFF_POLICY},
    "entropy bonus": {"entropy_coef": 0.1, **OFF_POLICY},
    "rloo": {"kind": "rloo", **OFF_POLICY, **ACCUMULATED},
    "gmpo": {"kind": "gmpo", **OFF_POLICY | {"epsilon": 0.4, "epsilon_high": 0.4}},
    "reweight": {"kind": "ours", "methods": {"reweight_alpha": 0.3}, **OFF_POLICY},
    "a weighting": {"kind": "ours", "methods": {"weighting": "delightful"}, **OFF_POLICY},
    "on-policy": {},
    "delta below the upper clip": {"delta": 1.005, **OFF_POLICY | {"epsilon_high": 0.3}, **ACCUMULATED},
}
CLIPLESS = ("sapo", "vespo", "gmpo", "a weighting")
"""Whose loss has no clip that TRL names."""
UNCORRECTED = ("rloo", "gmpo")


def disturb(trainer, *, corrected):
    """Responses of different lengths, with tools' tokens and, but for RLOO, another sampler, whose tokens TRL corrects
    for, or leaves out, if `corrected`.
    """
    own, generator = trainer._generate_and_score_completions, torch.Generator().manual_seed(0)

    def generate(batch):
        found = own(batch)
        mask = found["completion_mask"]
        mask *= torch.arange(mask.shape[1]) < torch.randint(3, 11, (len(mask), 1), generator=generator)
        if "old_logps" not in found:
            found["tool_mask"] = (torch.rand(mask.shape, generator=generator) < 0.8).long()
            found["num_items_in_batch"] = (mask * found["tool_mask"]).sum()
            factors = 0.5 + torch.rand(mask.shape, generator=generator)
            found |= {"importance_sampling_ratio": factors * (factors > 0.6)} if corrected else {}
            found["sampling_per_token_logps"] = -torch.rand(mask.shape, generator=generator)
        return found

    def prepared(batch):
        trainer.use_vllm = False
        found = prepare(batch)
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = corrected  # TRL's loss path of vLLM
        return found

    prepare = trainer._prepare_inputs
    trainer._generate_and_score_completions, trainer._prepare_inputs = generate, prepared


def by_hand(trainer, model, step, settings):
    """Every number of a step by a loop over its tokens; and how far rounding may take the shares of |w|·‖e − π‖."""
    sums = defaultdict(lambda: defaultdict(float))
    trainer.model.load_state_dict(step["weights"], strict=False)
    trainer.model.train()
    model.load_state_dict(step["weights"], strict=False)
    slack = 0.0
    for part in step["window"]:
        _, slopes = own_slopes(trainer, part)
        ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
        seen = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=seen).logits[:, part["prompt_ids"].shape[1] - 1 : -1]
        assert logits.dtype == torch.float64
        kept = part["completion_mask"] * part.get("tool_mask", 1)
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        if "top_entropy_quantile" in settings:
            least = np.quantile(entropies[kept.bool()], 1 - settings["top_entropy_quantile"])
        for row, place in kept.nonzero().tolist():
            own = int(part["completion_ids"][row, place])
            logprob, probs = float(logprobs[row, place, own]), logprobs[row, place].exp()
            old = float(part["old_per_token_logps"][row, place]) if "old_per_token_logps" in part else logprob
            difference = -probs
            difference[own] += 1
            norm, slope = float(difference.norm()), abs(float(slopes[row, place]))
            # Terms of size 1, each to float32, whose difference is ‖e − π‖²; π itself to the rounding of a logit.
            rounding = 16 * 2**-24 * max(float(logits[row, place].abs().max()) / TEMPERATURE, 1.0)
            slack += slope * min((math.sqrt(2) - 1) * (1 - math.exp(logprob)) + rounding, rounding / norm)
            of = sums[INTERVALS[min(int(4 * math.exp(old)), 3)]]
            of["tokens"] += 1
            of["amount"] += slope * norm
            of["entropy"] += float(entropies[row, place])
            if "sampling_per_token_logps" in part:
                of["mismatch"] += abs(old - float(part["sampling_per_token_logps"][row, place]))
            advantage = float(part["advantages"].reshape(len(kept), -1)[row, 0])
            lost = "importance_sampling_ratio" in part and float(part["importance_sampling_ratio"][row, place]) == 0
            lost |= "top_entropy_quantile" in settings and float(entropies[row, place]) < least
            others = kept[row].nonzero()[:, 0]
            own_logprobs = logprobs[row, others, part["completion_ids"][row, others]]
            if "off_policy_mask_threshold" in settings and advantage < 0:
                far = float((part["sampling_per_token_logps"][row, others] - own_logprobs).mean())
                lost |= far > settings["off_policy_mask_threshold"]
            ratio = math.exp(logprob - old)
            if "old_logps" in part:
                ratio = math.exp(float(own_logprobs.sum() - part["old_logps"][row]))
            elif settings.get("importance_sampling_level") == "sequence" and "old_per_token_logps" in part:
                ratio = math.exp(float((own_logprobs - part["old_per_token_logps"][row, others]).mean()))
            if settings.get("loss_type") == "cispo":
                clipped = ratio > settings["epsilon_high"] and advantage > 0
            else:
                low, high = 1 - settings.get("epsilon", 0.2), 1 + settings.get("epsilon_high", 0.2)
                near = [ratio * (1 + step) for step in (-1e-6, 1e-6)]  # where the surrogate is flat
                capped = [min(r, settings.get("delta", math.inf)) * advantage for r in near]
                values = [min(c, min(max(r, low), high) * advantage) for r, c in zip(near, capped, strict=True)]
                clipped = advantage != 0 and values[0] == values[1]
                if not {"loss_type", "methods", "beta"} & settings.keys() and settings.get("kind") != "gmpo":
                    # In a response's ratio a token keeps its part, also where its own term is left out.
                    lost_alone = lost and settings.get("importance_sampling_level") != "sequence"
                    assert (slope == 0) == (clipped or lost_alone or advantage == 0)
            of["masked"] += lost
            of["clipped"] += clipped
    return sums, slack


@bonus_is_left_out
@pytest.mark.parametrize("name", every(4, LOSSES))
def test_each_number_is_that_of_a_loop_over_the_trainers_own_logits(checkpoint, tmp_path, name):
    settings = {"max_steps": 4, "learning_rate": 1e-3} | LOSSES[name]
    trainer = make(checkpoint, tmp_path, **settings)
    callback, recorder = monitor(trainer), Recorder(trainer)
    disturb(trainer, corrected=name not in UNCORRECTED)
    train(trainer)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).double()
    clipped = 0
    for row, step in zip(callback.rows, recorder.steps, strict=True):
        trainer.current_gradient_accumulation_steps = len(step["window"])
        sums, slack = by_hand(trainer, model, step, settings)
        tokens, amount = (sum(of[kind] for of in sums.values()) for kind in ("tokens", "amount"))
        for a in INTERVALS:
            of, found = sums[a], {kind: row[f"{kind}/{a}"] for kind in KINDS}
            assert found["token_share"] == pytest.approx(of["tokens"] / tokens)
            if amount:
                assert found["logit_grad_share"] == pytest.approx(of["amount"] / amount, abs=2 * slack / amount + 1e-6)
            if not of["tokens"]:
                assert all(math.isnan(found[kind]) for kind in KINDS[2:])
                continue
            means = {kind: of[kind.removesuffix("_share")] / of["tokens"] for kind in KINDS[2:]}
            means |= {"masked_share": math.nan} if name in UNCORRECTED else {}
            means |= {"clipped_share": math.nan} if name in CLIPLESS else {}
            means |= {"mismatch": math.nan} if name == "rloo" else {}
            for kind, value in means.items():
                assert found[kind] == pytest.approx(value, abs=1e-4, nan_ok=True)
            clipped += found["clipped_share"]
    assert clipped > 0 or math.isnan(clipped) or name == "on-policy"


# ---- where the loss makes its log π itself


def make_fused(checkpoint, folder, *, fused, max_steps=4, **settings):
    """A trainer off its policy, with dropout, whose weights stay; fused: its loss never asks TRL for log π."""
    grpo = import_trl().GRPOTrainer

    class Fused(grpo):
        def _compute_loss(self, model, inputs):
            ids, seen = (
                torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")
            )
            own, count = inputs["completion_ids"], inputs["completion_ids"].shape[1]
            logits = model(input_ids=ids, attention_mask=seen).logits[:, -count - 1 : -1] / self.temperature
            logprobs = logits.log_softmax(-1).gather(-1, own[..., None])[..., 0]
            ratio = (logprobs - inputs["old_per_token_logps"]).exp()
            advantages = inputs["advantages"][:, None]
            clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
            terms = torch.min(ratio * advantages, clipped * advantages) * inputs["completion_mask"]
            return -terms.sum() / inputs["num_items_in_batch"]

    settings = {**OFF_POLICY, **ACCUMULATED, "max_steps": max_steps, "learning_rate": 0.0} | settings
    trainer = make_trainer(checkpoint, folder, kind=Fused if fused else grpo, **settings)
    own, draw = trainer._generate_and_score_completions, torch.Generator().manual_seed(0)

    def generate(batch):
        found = own(batch)
        found["old_per_token_logps"] += 0.1 * torch.randn(found["old_per_token_logps"].shape, generator=draw)
        return found

    trainer._generate_and_score_completions = generate
    return trainer


@pytest.mark.parametrize("loss_type", every(2, ["dapo", "grpo"]))
def test_a_pass_of_its_own_gives_what_the_losss_pass_would(checkpoint, tmp_path, loss_type):
    seen = monitor(trainer := make_fused(checkpoint, tmp_path / "seen", fused=False, loss_type=loss_type))
    train(trainer)
    trainer = make_fused(checkpoint, tmp_path / "unseen", fused=True, loss_type=loss_type)
    unseen = monitor(trainer, forward_every=2, page_every=4)
    train(trainer)
    for place, (row, wanted) in enumerate(zip(unseen.rows, seen.rows, strict=True)):
        if place % 2:
            assert all(math.isnan(value) for name, value in row.items() if name != "step")
        else:
            assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6, nan_ok=True)
    assert max(row[f"clipped_share/{a}"] for row in seen.rows for a in INTERVALS) > 0
    lines = [[json.loads(line)["largest"] for line in each.path.read_text().splitlines()] for each in (seen, unseen)]
    places = [[[token["position"] for token in told] for told in each] for each in lines]
    assert places[1] == [places[0][0], [], places[0][2], []]


def test_with_passes_of_its_own_four_steps_end_with_the_same_weights(checkpoint, tmp_path):
    ends = []
    for folder in ("without", "with"):
        trainer = make_fused(checkpoint, tmp_path / folder, fused=True, max_steps=4, learning_rate=1e-3)
        for module in trainer.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2
        callback = monitor(trainer, forward_every=1) if folder == "with" else None
        train(trainer)
        ends.append(weights(trainer.model))
    assert all(torch.equal(ends[0][name], weight) for name, weight in ends[1].items())
    assert len(callback.rows) == 4 and not any(math.isnan(row["token_share/p0-25"]) for row in callback.rows)


def test_without_such_passes_a_warning_says_that_nothing_is_seen(checkpoint, tmp_path):
    trainer = make_fused(checkpoint, tmp_path, fused=True, max_steps=2)
    callback = monitor(trainer)
    with pytest.warns(UserWarning, match="forward_every"):
        train(trainer)
    assert all(math.isnan(row["token_share/p0-25"]) for row in callback.rows)


@pytest.mark.parametrize("fused", [False, True])
def test_a_head_without_squares_is_one_warning_and_training_goes_on(checkpoint, tmp_path, monkeypatch, fused):
    from trl.trainer import utils

    head = utils._ChunkedLogProbFunction
    apply = staticmethod(lambda *args: (*head.apply(*args)[:2], None, None, None))
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", type("Without", (), {"apply": apply}))
    trainer = make_fused(checkpoint, tmp_path, fused=fused, max_steps=2)
    callback = monitor(trainer, forward_every=1)
    with pytest.warns(UserWarning) as caught:
        train(trainer)
    assert len([w for w in caught if "gradscope" in str(w.message)]) == 1 and trainer.state.global_step == 2
    assert all(math.isnan(row["token_share/p0-25"]) for row in callback.rows)


def test_the_largest_tokens_are_written_as_text(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=3, learning_rate=1e-3)
    callback, recorder = monitor(trainer, largest=5), Recorder(trainer)
    train(trainer)
    lines = [json.loads(line) for line in callback.path.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(checkpoint).double()
    decode = trainer.processing_class.decode
    for line, step in zip(lines, recorder.steps, strict=True):
        model.load_state_dict(step["weights"], strict=False)
        trainer.model.load_state_dict(step["weights"], strict=False)
        trainer.model.train()
        (part,), found = step["window"], []
        _, slopes = own_slopes(trainer, part)
        start = part["prompt_ids"].shape[1]
        ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
        seen = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
        with torch.no_grad():
            probs = (model(input_ids=ids, attention_mask=seen).logits[:, start - 1 : -1] / TEMPERATURE).softmax(-1)
        for row, place in part["completion_mask"].nonzero().tolist():
            own = int(part["completion_ids"][row, place])
            difference = -probs[row, place]
            difference[own] += 1
            amount = abs(float(slopes[row, place])) * float(difference.norm())
            before = part["completion_ids"][row, max(0, place - 12) : place]
            found.append((amount, float(probs[row, place, own]), decode([own]), decode(before), place))
        whole = sum(amount for amount, *_ in found)
        largest = sorted(found, reverse=True)[:5]
        shares = [amount / whole for amount, *_ in largest]  # of a whole whose certain tokens are known to √2
        assert [each["share"] for each in line["largest"]] == pytest.approx(shares, rel=1e-2)
        told = [(each["token"], each["before"], each["position"]) for each in line["largest"]]
        assert sorted(told) == sorted(each[2:] for each in largest)
        assert [each["prob"] for each in line["largest"]] == pytest.approx([p for _, p, *_ in largest], rel=1e-4)
        wanted = {name: value for name, value in callback.rows[line["step"] - 1].items() if math.isfinite(value)}
        assert {name: value for name, value in line.items() if name != "largest"} == wanted


def test_the_numbers_go_where_trl_logs_its_own(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=4, logging_steps=2)
    callback = monitor(trainer)
    train(trainer)
    logged = [entry for entry in trainer.state.log_history if "gradscope/live/token_share/p0-25" in entry]
    for entry, rows in zip(logged, (callback.rows[:2], callback.rows[2:]), strict=True):
        for kind in KINDS:
            for a in INTERVALS:
                values = [row[f"{kind}/{a}"] for row in rows if math.isfinite(row[f"{kind}/{a}"])]
                name = f"gradscope/live/{kind}/{a}"
                assert (name in entry) == bool(values)
                assert not values or entry[name] == pytest.approx(sum(values) / len(values))


def test_a_resumed_run_goes_on_with_the_file_and_a_new_one_starts_it_anew(checkpoint, tmp_path):
    def steps():
        return [json.loads(line)["step"] for line in callback.path.read_text().splitlines()]

    settings = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(checkpoint, tmp_path, max_steps=4, **settings)
    callback = monitor(trainer)
    train(trainer)
    assert steps() == [1, 2, 3, 4]
    again = make_trainer(checkpoint, tmp_path, max_steps=5, **settings)
    callback = monitor(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps() == [1, 2, 3, 4, 5] and [row["step"] for row in callback.rows] == [3, 4, 5]
    new = make_trainer(checkpoint, tmp_path, max_steps=1)
    callback = monitor(new)
    train(new)
    assert steps() == [1]


def test_a_step_without_any_gradient_has_no_share(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=1)
    trainer._calculate_rewards = lambda inputs, *_: torch.ones(len(inputs), 1)
    callback = monitor(trainer)
    train(trainer)
    assert all(math.isnan(callback.rows[0][f"logit_grad_share/{a}"]) for a in INTERVALS)
    assert sum(callback.rows[0][f"token_share/{a}"] for a in INTERVALS) == pytest.approx(1)
    assert json.loads(callback.path.read_text())["largest"] == []


def test_with_adapters_the_numbers_are_there(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(checkpoint, tmp_path, peft=lora, beta=0.1, max_steps=2, **ACCUMULATED)
    callback, recorder = monitor(trainer), Recorder(trainer)
    train(trainer)
    for row, step in zip(callback.rows, recorder.steps, strict=True):
        assert sum(row[f"logit_grad_share/{a}"] for a in INTERVALS) == pytest.approx(1)
        assert sum(int(part["completion_mask"].sum()) for part in step["window"]) == 80


# ---- where people look

KINDS_BY_PROB = ("tokens_by_prob", "logit_grad_by_prob")


class Backend(TrainerCallback):
    """A callback like transformers' for trackio, whose module records what it is given, and for TensorBoard."""

    _initialized = True

    def __init__(self):
        self.alerts, self.logged, self.artifacts, self.raw = [], [], [], []
        self._trackio = SimpleNamespace(
            Histogram=lambda np_histogram: np_histogram,
            AlertLevel=SimpleNamespace(WARN="warn", INFO="info"),
            alert=lambda **told: self.alerts.append(told),
            log=self.logged.append,
            log_artifact=lambda path, **told: self.artifacts.append((Path(path).read_text(), told)),
        )
        self._ml_flow = SimpleNamespace(log_artifact=lambda path: self.artifacts.append((Path(path).read_text(), {})))
        self.tb_writer = SimpleNamespace(add_histogram_raw=lambda name, **told: self.raw.append((name, told)))


def test_histograms_are_those_of_the_steps_since_the_last_log(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=4, logging_steps=2, learning_rate=1e-3)
    trainer.add_callback(backend := Backend())
    callback = monitor(trainer)
    train(trainer)
    assert [entry["train/global_step"] for entry in backend.logged] == [2, 4]
    for entry, rows in zip(backend.logged, (callback.rows[:2], callback.rows[2:]), strict=True):
        counts, edges = entry["train/gradscope/live/tokens_by_prob"]
        assert counts.sum() == 160 and edges[[0, 5, 10, 15, 20]].tolist() == [0, 0.25, 0.5, 0.75, 1]
        for place, a in enumerate(INTERVALS):
            assert counts[5 * place :][:5].sum() == pytest.approx(80 * sum(row[f"token_share/{a}"] for row in rows))
            amounts, _ = entry["train/gradscope/live/logit_grad_by_prob"]
            shares = [row[f"logit_grad_share/{a}"] for row in rows]
            assert min(shares) - 1e-6 <= amounts[5 * place :][:5].sum() / amounts.sum() <= max(shares) + 1e-6
    for (name, told), (step, kind) in zip(backend.raw, [(s, k) for s in (0, 1) for k in KINDS_BY_PROB], strict=True):
        heights, edges = backend.logged[step][name]
        assert name.endswith(kind) and told["global_step"] == 2 * step + 2
        assert told["bucket_counts"] == heights.tolist() and told["bucket_limits"] == edges[1:].tolist()
        assert told["num"] == heights.sum()


@pytest.mark.all
def test_an_alert_is_sent_where_a_planted_verdict_changes(checkpoint, tmp_path):
    """First tokens of π < ¼ are trained on, then, nearly alone, the others; an alert at the first window of either."""

    class Planted(import_trl().GRPOTrainer):
        def _compute_loss(self, model, inputs):
            ids, seen = (
                torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")
            )
            logprobs, *_ = self._get_per_token_logps_and_entropies(model, ids, seen, inputs["completion_ids"].shape[1])
            low = logprobs.detach().exp() < 0.25
            chosen = low if self.state.global_step < 8 else ~low
            return -(logprobs * (0.01 + chosen.float()) * inputs["completion_mask"]).sum()

    settings = {"max_steps": 16, "num_generations": 2, "learning_rate": 1e-9}
    trainer = make_trainer(checkpoint, tmp_path, kind=Planted, **settings)
    trainer.add_callback(backend := Backend())
    callback = monitor(trainer, alert=True, window=4)
    said = train(trainer)
    assert [(told["title"].split()[-1], told["level"]) for told in backend.alerts] == [("4", "warn"), ("12", "info")]
    assert all(told["text"] in said for told in backend.alerts)
    assert callback.verdict is Verdict.LESS
    shares = [row["logit_grad_share/p0-25"] for row in callback.rows]
    assert min(shares[:8]) > 0.9 and max(shares[8:]) < 0.1


def test_a_page_is_written_and_sent_every_so_many_steps_and_at_the_end(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=5, learning_rate=1e-3)
    trainer.add_callback(backend := Backend())
    callback = monitor(trainer, page_every=2, largest=3)
    train(trainer)
    assert [told.get("type") for _, told in backend.artifacts] == ["report", None] * 3
    page = callback.path.with_suffix(".html").read_text()
    assert page == backend.artifacts[-1][0]
    assert "GradScopeCallback" in page and "gradscope/grad_share" in page  # where exact shares are
    recent = [told for line in callback.path.read_text().splitlines() for told in json.loads(line)["largest"]]
    assert len(recent) == 15 and all(told["before"] in page for told in recent)


def test_without_a_page_or_an_alert_nothing_but_numbers_leaves_the_machine(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=3)
    trainer.add_callback(backend := Backend())
    callback = monitor(trainer, window=1)
    train(trainer)
    assert backend.alerts == backend.artifacts == [] and len(backend.logged) == 3
    assert not callback.path.with_suffix(".html").exists()


# ---- several processes

TOGETHER = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.trl_runs import Recorder, import_trl, make_trainer
from gradscope.integrations.trl import TokenMonitor
out, rank = Path(sys.argv[2]), int(os.environ["RANK"])
import_trl()
trainer = make_trainer(out / "policy", out / "run", per_device_train_batch_size=4, max_steps=2, ddp_backend="gloo")
own = trainer._generate_and_score_completions
def generate(batch):
    found = own(batch)
    found["completion_mask"][:, 3 + 4 * rank:] = 0
    return found
trainer._generate_and_score_completions = generate
callback, recorder = TokenMonitor(trainer), Recorder(trainer)
trainer.add_callback(callback)
trainer.train()
(out / f"{rank}.json").write_text(json.dumps(callback.rows))
"""


@pytest.mark.all
def test_several_processes_add_up(tmp_path):
    save_policy(tmp_path / "policy")
    (code := tmp_path / "together.py").write_text(TOGETHER)
    for ended in launch(code, Path(__file__).parents[2], tmp_path):
        assert ended.status == 0, ended.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, nan_ok=True)
        counts = [40 * one[f"token_share/{a}"] for a in INTERVALS]  # 4 responses of 3 tokens, and 4 of 7
        assert counts == pytest.approx([round(count) for count in counts]) and sum(counts) == pytest.approx(40)
    lines = (tmp_path / "run" / "gradscope" / "live.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


# ---- who is refused


def test_another_trainer_is_refused_by_name(checkpoint, tmp_path):
    with refused("SimpleNamespace"):
        TokenMonitor(SimpleNamespace())


@pytest.mark.parametrize(
    "settings", [{"largest": -1}, {"edges": [0.5, 0.2]}, {"window": 0}, {"page_every": 0}, {"forward_every": 0}]
)
def test_settings_out_of_range_are_refused(checkpoint, tmp_path, settings):
    with refused(*settings):
        TokenMonitor(make_trainer(checkpoint, tmp_path), **settings)


def test_a_loss_whose_weights_are_not_known_has_no_passes_of_its_own(checkpoint, tmp_path):
    with refused("sapo"):
        TokenMonitor(make_trainer(checkpoint, tmp_path, loss_type="sapo"), forward_every=2)
    with refused("forward_every"):
        TokenMonitor(make(checkpoint, tmp_path, kind="rloo"), forward_every=2)


@pytest.mark.parametrize("coef", every(2, [0.1, 0.0]))
def test_what_the_loss_has_beside_log_probabilities_is_named_once_and_on_the_page(checkpoint, tmp_path, coef):
    trainer = make_trainer(checkpoint, tmp_path, entropy_coef=coef, max_steps=3)
    callback = monitor(trainer, page_every=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(trainer)
    assert len([w for w in caught if "the entropies" in str(w.message)]) == (coef > 0)
    assert ("the entropies" in callback.path.with_suffix(".html").read_text()) == (coef > 0)
