"""TRL's batches, settings and weights in gradscope's words, and the callback, against TRL's own loss and gradients."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations
from types import MethodType

import numpy as np
import pandas as pd
import pytest
import torch
from support.exact import FLOAT32_GRADIENT
from support.policies import make_model
from support.refusals import refused
from support.tiers import every
from support.trl_runs import TEMPERATURE, Recorder, import_trl, make_trainer, needs_trl, save_policy, train, weights
from tokenizers import normalizers

from analyses.recipes.hasty_analysis import write_hastily
from gradscope import interval_gradients, load_policy, measure
from gradscope.errors import InputError
from gradscope.integrations.trl.batch import batch_from_trl, response_denominators, trl_settings
from gradscope.integrations.trl.callback import GradScopeCallback
from gradscope.objective import WEIGHTINGS, batch_statistics, make_weighting
from gradscope.policy import Policy, find_blocks, find_checkpoint
from gradscope.rollouts import Response, collate
from gradscope.tasks.knights_knaves import compact_prompt, draw_statements
from gradscope.tasks.knights_knaves_wording import COMPACT_NAMES

# Log-probabilities are planted, far from the policy's.
pytestmark = [*needs_trl, pytest.mark.filterwarnings("ignore::gradscope.gradients.ContradictionWarning")]

CPU = torch.device("cpu")
INTERVALS = {0: "p0-25", 1: "p25-50", 2: "p50-75", 3: "p75-100"}
FLOAT32 = 2 * FLOAT32_GRADIENT
"""The same sums in float32, by two programs."""
RATIOS = 30 * 64 * 2**-24
"""Weights that are a power of at most 3 of the product of ten ratios, each of log-probabilities of logits below 64."""
LOSS_TYPES = ["dapo", "bnpo", "grpo", "dr_grpo", "luspo"]
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def test_trl_loads_the_embedded_policy_from_its_folder_and_its_tokenizer_gives_the_same_ids(tmp_path):
    from datasets import Dataset

    config = import_trl().GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    data = Dataset.from_dict({"prompt": ["Zoey: Oliver is a knave.\n<think>"]})
    trainer = import_trl().GRPOTrainer(find_checkpoint("embedded"), lambda **_: [], args=config, train_dataset=data)
    policy, rng = load_policy("embedded"), random.Random(0)
    for _ in range(1000):
        statements = draw_statements(rng.choice((2, 3, 4, 5)), rng)
        text = compact_prompt(statements) + write_hastily(statements, COMPACT_NAMES, rng=rng)
        assert trainer.processing_class.encode(text) == policy.encode_prompt(text)
    kept = dict(policy.model.named_parameters())
    assert all(torch.equal(kept[name], weight) for name, weight in trainer.model.named_parameters())


def test_a_batch_of_trl_is_the_batch_of_its_responses():
    inputs = {
        "prompt_ids": torch.tensor([[0, 5, 6], [7, 8, 9], [0, 5, 6]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([[10, 11], [12, 0], [13, 14]]),
        "completion_mask": torch.tensor([[1, 1], [1, 0], [1, 1]]),
        "tool_mask": torch.tensor([[1, 0], [1, 1], [1, 1]]),
        "advantages": torch.tensor([0.5, -1.0, 2.0]),
        "old_per_token_logps": torch.tensor([[-0.1, -0.2], [-0.3, 0.0], [-0.4, -0.5]]),
    }
    wide = inputs | {
        "prompt_ids": torch.tensor([[3, 7, 8, 9]]),
        "prompt_mask": torch.tensor([[1, 1, 1, 1]]),
        "completion_ids": torch.tensor([[15, 16, 17]]),
        "completion_mask": torch.tensor([[1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 1, 1]]),
        "advantages": torch.tensor([[1.0, 2.0, 3.0]]),
        "old_per_token_logps": torch.tensor([[-0.6, -0.7, -0.8]]),
    }
    found, _ = batch_from_trl([inputs, wide], 0.7).left_aligned()
    wanted = collate(
        [
            Response([5, 6], [10, 11], 0, 0.7, None, 0.5, [-0.1, -0.2], None, [True, False]),
            Response([7, 8, 9], [12], 1, 0.7, None, -1.0, [-0.3]),
            Response([5, 6], [13, 14], 0, 0.7, None, 2.0, [-0.4, -0.5]),
            Response([3, 7, 8, 9], [15, 16, 17], 2, 0.7, None, [1.0, 2.0, 3.0], [-0.6, -0.7, -0.8]),
        ]
    )
    for name in ("input_ids", "attention_mask", "response_mask", "response_start", "group_ids", "temperature"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    keep = wanted.response_mask
    for name in ("advantages", "old_logprobs"):
        assert torch.equal(getattr(found, name)[keep], getattr(wanted, name)[keep]), name
    assert found.ref_logprobs is None


def test_a_batch_that_is_not_trls_or_holds_images_is_refused():
    with refused("prompt_ids", "prompt_mask"):
        batch_from_trl({"completion_ids": torch.zeros(1, 1)}, 1.0)
    ids = torch.ones(1, 1, dtype=torch.long)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    with refused("images"):
        batch_from_trl(dict.fromkeys(names, ids) | {"advantages": torch.ones(1), "pixel_values": ids}, 1.0)


def record(checkpoint, folder, *, step=0, **settings):
    """A trainer, and the micro-batches of its optimizer step of that number, as it was before it."""
    trainer = make_trainer(checkpoint, folder, move=0.02, max_steps=step + 1, **settings)
    recorder = Recorder(trainer)
    train(trainer)
    trainer.model.load_state_dict(recorder.steps[step]["weights"], strict=False)
    trainer.current_gradient_accumulation_steps = len(recorder.steps[step]["window"])
    trainer.model.train()
    return trainer, recorder.steps[step]


def slopes_of_trl(trainer, inputs):
    """−∂loss/∂logprob of TRL's own loss on one micro-batch [B, C]."""
    own = type(trainer)._get_per_token_logps_and_entropies
    leaves = []

    def leaf(*args, **keywords):
        logprobs, *rest = own(trainer, *args, **keywords)
        leaves.append(logprobs.detach().requires_grad_(True))
        return leaves[0], *rest

    trainer._get_per_token_logps_and_entropies = leaf
    try:
        loss = trainer._compute_loss(trainer.model, inputs)
    finally:
        del trainer._get_per_token_logps_and_entropies
    return -torch.autograd.grad(loss, leaves[0])[0]


def policy_of(trainer):
    model = make_model("qwen2")
    model.load_state_dict(trainer.model.state_dict())
    return Policy(model, None, find_blocks(model))


@pytest.mark.parametrize(
    "settings",
    every(
        2,
        [
            {},
            {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 2.0, "beta": 0.2},
            {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.15, "beta": 0.2, "use_bias_correction_kl": False},
        ],
    ),
    ids=["default", "delta above the clip", "delta below the clip"],
)
def test_the_tables_weights_are_those_of_trls_loss(checkpoint, tmp_path, settings):
    trainer, step = record(checkpoint, tmp_path, num_iterations=2, **settings)
    (inputs,) = step["window"]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(inputs["old_per_token_logps"].shape, generator=generator)
    ratio = 0.5 + torch.rand(noise.shape, generator=generator)
    inputs = inputs | {
        "old_per_token_logps": (inputs["old_per_token_logps"] + 0.3 * noise).clamp(max=0.0),
        "importance_sampling_ratio": ratio,
    }
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True  # its loss path; nothing is sampled here
    batch = batch_from_trl(inputs, TEMPERATURE)
    table = measure(policy_of(trainer), batch, loss=trl_settings(trainer.args).loss)
    kept = inputs["completion_mask"].bool()
    wanted = (slopes_of_trl(trainer, inputs) * batch.num_tokens)[kept].numpy()
    np.testing.assert_allclose(table["weight"], wanted, atol=FLOAT32 * np.abs(wanted).max())
    advantages = batch.advantages[batch.response_mask]
    rose = table["logprob"] > table["old_logprob"]
    for positive in (True, False):  # both ends of the range are at work, for both signs
        assert table["clipped"][(advantages > 0).numpy() == positive].any()
    assert rose.any() and not table["clipped"].all()


GMPO = "GMPOTrainer's"
LOSSES = {
    "grpo": ("token-mean", {}),
    "top-entropy:q=0.3": ("token-mean", {"top_entropy_quantile": 0.3}),
    "cispo:eps_high=1.1": ("token-mean", {"loss_type": "cispo", "epsilon_high": 1.1}),
    "sapo": ("sequence", {"loss_type": "sapo"}),
    "gspo:eps_low=0.01,eps_high=0.02": (
        "sequence",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.02},
    ),
    "gmpo:eps_low=0.1,eps_high=0.05": ("sequence", {"_compute_loss": GMPO, "epsilon_low": 0.1, "epsilon_high": 0.05}),
    "vespo": ("token-mean", {"loss_type": "vespo"}),
    "opsm:delta=0.02": ("token-mean", {"off_policy_mask_threshold": 0.02}),
}
"""Weighting → how TRL's loss adds up, and the trainer's attributes with which it has that weighting."""


def slopes_with(trainer, inputs, attributes, monkeypatch):
    """`slopes_of_trl` of a trainer with these attributes."""
    with monkeypatch.context() as patch:
        for attribute, value in attributes.items():
            patch.setattr(trainer, attribute, own_gmpo(trainer) if value == GMPO else value)
        return slopes_of_trl(trainer, inputs)


def own_gmpo(trainer):
    from trl.experimental.gmpo import GMPOTrainer

    return MethodType(GMPOTrainer._compute_loss, trainer)


@pytest.mark.parametrize("case", ["on-policy", "two steps old"])
def test_weightings_are_those_of_trls_loss(checkpoint, tmp_path, case, monkeypatch):
    old = {"step": 0} if case == "on-policy" else {"step": 2, "num_iterations": 3}
    trainer, step = record(checkpoint, tmp_path, **old)
    (inputs,) = step["window"]
    batch, kept = batch_from_trl(inputs, TEMPERATURE), inputs["completion_mask"].bool()
    table = measure(policy_of(trainer), batch, loss=trl_settings(trainer.args).loss, self_check=False)
    assert table["old_logprob"].isna().all() == (case == "on-policy")
    different = []
    for name, (aggregation, attributes) in LOSSES.items():
        wanted = (slopes_with(trainer, inputs, attributes, monkeypatch) * batch.num_tokens)[kept].numpy()
        found = make_weighting(name).weights(table, aggregation=aggregation)["all"]
        np.testing.assert_allclose(found, wanted, atol=RATIOS * np.abs(wanted).max(), err_msg=name)
        plain = make_weighting("grpo").weights(table, aggregation=aggregation)["all"]
        different += [name] * (not np.allclose(found, plain, rtol=1e-4))
    always = ["grpo", "top-entropy:q=0.3"]
    assert different == [name for name in LOSSES if name == always[1] or (case != "on-policy" and name not in always)]


CORRECTIONS = {
    "tis:low=0.9,high=1.3": {"mode": "token_truncate", "clip_min": 0.9, "clip_max": 1.3},
    "icepop:low=0.8,high=1.3": {"mode": "token_mask", "clip_min": 0.8, "clip_max": 1.3},
    "sequence-tis:low=0.7,high=1.8": {"mode": "sequence_truncate", "clip_min": 0.7, "clip_max": 1.8},
    "sequence-mask": {},
    "sequence-mask:low=0.5,high=1.5": {"clip_min": 0.5, "clip_max": 1.5},
    "vespo:sampler=1,cap=1.2": {"mode": "token_truncate", "clip_max": 1.2, "loss_type": "vespo"},
    "opsm:delta=0.05,sampler=1": {"correction": False, "off_policy_mask_threshold": 0.05},
}
"""Weighting → TRL's settings vllm_importance_sampling_…, the others its defaults, and further attributes."""


def sampled_by_another(trainer, inputs, logprobs):
    """What TRL makes of responses that vLLM would have sampled with these log-probabilities, a list of each."""
    prompts, completions = (
        [ids[mask.bool()].tolist() for ids, mask in zip(inputs[f"{part}_ids"], inputs[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    )
    trainer._generate = lambda _: (prompts, completions, None, [""] * len(prompts), logprobs, {}, None, None)
    try:
        return trainer._generate_and_score_completions([{"prompt": ""} for _ in prompts])
    finally:
        del trainer._generate


def test_corrections_for_the_sampler_are_trls(checkpoint, tmp_path, monkeypatch):
    trainer, step = record(checkpoint, tmp_path)
    (inputs,) = step["window"]
    kept = inputs["completion_mask"].bool()
    trainer.use_vllm = True  # its path; nothing is sampled here
    unknown = [[0.0] * int(count) for count in kept.sum(1)]
    own = sampled_by_another(trainer, inputs, unknown)["old_per_token_logps"]
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    other = [row[mask].tolist() for row, mask in zip((own + 0.3 * noise).clamp(max=-1e-3), kept, strict=True)]
    state, reached = {name: p.detach().clone() for name, p in trainer.model.state_dict().items()}, {}
    for name, settings in CORRECTIONS.items():
        trainer.model.load_state_dict(state)
        vllm = {key: settings[key] for key in ("mode", "clip_min", "clip_max", "correction") if key in settings}
        attributes = {f"vllm_importance_sampling_{key}": value for key, value in vllm.items()}
        attributes |= {key: value for key, value in settings.items() if key not in vllm}
        with monkeypatch.context() as patch:
            for attribute, value in attributes.items():
                patch.setattr(trainer, attribute, value)
            scored = other if name.startswith("opsm") else [[None, *row[1:]] for row in other]  # None: vLLM's NaN
            made = sampled_by_another(trainer, inputs, scored)
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6))
            made = {key: value.clone() for key, value in made.items()}
            wanted = (slopes_of_trl(trainer, made) * kept.sum())[kept].numpy()
        batch = batch_from_trl(made | {"importance_sampling_ratio": torch.ones(kept.shape)}, TEMPERATURE)
        table = measure(policy_of(trainer), batch, loss=trl_settings(trainer.args).loss, self_check=False)
        table["sampler_logprob"] = np.concatenate(scored).astype(float)
        found = make_weighting(name).weights(table)["all"]
        np.testing.assert_allclose(found, wanted, atol=RATIOS * np.abs(wanted).max(), err_msg=name)
        plain = make_weighting("grpo").weights(table)["all"]
        assert not np.allclose(found, plain, rtol=1e-3), name
        reached[name] = (found == 0) & (plain != 0)
    for name in (
        "icepop:low=0.8,high=1.3",
        "sequence-mask",
        "sequence-mask:low=0.5,high=1.5",
        "opsm:delta=0.05,sampler=1",
    ):
        assert reached[name].any() and not reached[name].all(), name


def test_those_said_to_be_held_against_trls_loss_are():
    said = {name for name, kind in WEIGHTINGS.items() if {"TRL", "TRL's GMPO"} & {*kind.OWN_LOSSES}}
    assert {name.partition(":")[0] for name in (*LOSSES, *CORRECTIONS)} == said


@pytest.mark.parametrize("loss_type", every(2, LOSS_TYPES))
def test_a_loss_types_denominators_are_those_of_trls_loss(checkpoint, tmp_path, loss_type):
    trainer, step = record(checkpoint, tmp_path, loss_type=loss_type, beta=0.2, num_iterations=2, **ACCUMULATED)
    batch = batch_from_trl(step["window"], TEMPERATURE)
    assert len(step["window"]) == 2 and len(batch) == 8
    table = measure(policy_of(trainer), batch, loss=trl_settings(trainer.args).loss)
    denominators = response_denominators(trainer.args, step["window"])
    slopes = torch.cat([slopes_of_trl(trainer, inputs) for inputs in step["window"]])
    wanted = slopes[torch.cat([inputs["completion_mask"] for inputs in step["window"]]).bool()].numpy()
    found = table["weight"] / denominators.numpy()[table["response"]]
    np.testing.assert_allclose(found, wanted, atol=3 * FLOAT32 * np.abs(wanted).max())


def test_advantages_made_of_rewards_with_trls_eps_are_trls(checkpoint, tmp_path):
    trainer, step = record(checkpoint, tmp_path)
    batch = batch_from_trl(step["window"], TEMPERATURE)
    rows = zip(batch.input_ids, batch.response_mask, strict=True)
    rewards = torch.tensor([float((ids[kept] % 2 == 0).float().mean()) for ids, kept in rows])
    unknown = replace(batch, advantages=None, rewards=rewards)
    settings = trl_settings(trainer.args)
    table = measure(policy_of(trainer), unknown, loss=settings.loss, advantage_eps=settings.advantage_eps)
    # TRL computes the deviation in float32; eps 1e-6 in place of 1e-4 is ten times further off.
    wanted = batch.advantages[batch.response_mask].numpy()
    np.testing.assert_allclose(table["advantage"], wanted, rtol=2e-5)
    paper = measure(policy_of(trainer), unknown, loss=settings.loss)
    assert np.abs(paper["advantage"] / wanted - 1).max() > 2e-4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_type": "cispo"}, "loss_type is 'cispo'"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level is 'sequence'"),
        ({"entropy_coef": 0.1}, "entropy bonus"),
        ({"use_adaptive_entropy": True}, "entropy bonus"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile is 0.2"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold is 0.5"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef"),
        ({"delta": 0.9}, "delta is 0.9"),
        ({"epsilon": 1.5}, "clip_ratio_low is 1.5"),
    ],
)
def test_a_loss_without_a_counterpart_is_refused_in_one_line(tmp_path, settings, words):
    config = import_trl().GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)
    with pytest.raises(InputError) as caught:
        trl_settings(config)
    assert words in str(caught.value)


# ---- the callback


def watched(checkpoint, folder, *, every=1, **settings):
    trainer = make_trainer(checkpoint, folder, **settings)
    callback = GradScopeCallback(trainer, every=every, cosines=True, micro_batch_size=3)
    recorder = Recorder(trainer)
    trainer.add_callback(callback)
    return trainer, callback, recorder


@pytest.mark.parametrize(
    "methods", every(2, [{"reweight_alpha": 0.3, "lopti_eta": 0.5}, None]), ids=["both methods", "stock"]
)
def test_training_with_the_callback_is_training_without_it_bit_for_bit(checkpoint, tmp_path, methods):
    settings = {"num_iterations": 2, "beta": 0.1, "max_steps": 4, **ACCUMULATED}
    if methods:
        from gradscope.integrations.trl import GradScopeGRPOTrainer

        settings |= {"kind": GradScopeGRPOTrainer, "methods": methods}
    plain = make_trainer(checkpoint, tmp_path / "plain", **settings)
    before = Recorder(plain)
    train(plain)
    trainer, callback, recorder = watched(checkpoint, tmp_path / "watched", **settings)
    train(trainer)
    assert len(callback.rows) == 4
    for a, b in zip(before.steps, recorder.steps, strict=True):
        assert all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])
        assert all(torch.equal(a["gradient"][name], b["gradient"][name]) for name in a["gradient"])
        assert torch.equal(a["random"], b["random"]) and a["training"] == b["training"]
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True))
    assert all(p.requires_grad for p in trainer.model.parameters()) and "compute_loss" not in vars(trainer)


def test_the_numbers_of_a_step_are_those_of_interval_gradients_and_of_a_count(checkpoint, tmp_path):
    trainer, callback, recorder = watched(checkpoint, tmp_path, move=0.02, beta=0.1, **ACCUMULATED)
    train(trainer)
    ends = [step["weights"] for step in recorder.steps[1:]] + [weights(trainer.model)]
    for row, step, end in zip(callback.rows, recorder.steps, ends, strict=True):
        batch = batch_from_trl(step["window"], TEMPERATURE)
        model = make_model("qwen2")
        policy = Policy(model, None, find_blocks(model))
        model.load_state_dict(step["weights"], strict=False)
        wanted = interval_gradients(policy, batch, loss=trl_settings(trainer.args).loss)
        old = batch_statistics(model, batch, micro_batch_size=8, device=CPU)
        model.load_state_dict(end, strict=False)
        new = batch_statistics(model, batch, micro_batch_size=8, device=CPU)
        for interval in wanted.table["interval"]:
            line, name = wanted.table.set_index("interval").loc[interval], INTERVALS.get(interval, interval)
            close(row[f"grad_norm/{name}"], line["norm"])
            if interval != "all":
                close(row[f"grad_share/{name}"], line["share"])
                close(row[f"grad_cosine/{name}/all"], line["cosine_with_all"])
                close(row[f"token_share/{name}"], line["num_tokens"] / batch.num_tokens)
                prob = old.logprob.exp()
                inside = batch.response_mask & (prob >= interval / 4) & ((prob < interval / 4 + 0.25) | (interval == 3))
                for sign, asked in (("positive", batch.advantages > 0), ("negative", batch.advantages < 0)):
                    moved = (log_odds(new) - log_odds(old))[inside & asked]
                    right = moved > 0 if sign == "positive" else moved < 0
                    share = right.float().sum() / (moved != 0).sum()
                    close(row[f"right_direction_{sign}/{name}"], float(share))
        for a, b in combinations(range(4), 2):
            close(row[f"grad_cosine/{INTERVALS[a]}/{INTERVALS[b]}"], wanted.cosines[b][a])
        assert row["num_tokens"] == batch.num_tokens


def log_odds(statistics):
    return statistics.logprob - statistics.log_one_minus_prob


def close(found, wanted):
    """Cosines are of vectors that a batch of ten tokens may make small."""
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6, nan_ok=True)


def test_every_kth_step_is_logged_written_and_told(checkpoint, tmp_path):
    trainer, callback, _ = watched(checkpoint, tmp_path, every=2, max_steps=4)
    words = train(trainer)
    table = pd.read_parquet(tmp_path / "gradscope" / "metrics.parquet")
    pd.testing.assert_frame_equal(table, pd.DataFrame(callback.rows))
    assert list(table["step"]) == [1, 3]
    assert [p.name for p in (tmp_path / "gradscope").iterdir()] == ["metrics.parquet"]
    logged = [r for r in trainer.state.log_history if "gradscope/grad_norm/all" in r]
    assert [record["step"] for record in logged] == [1, 3]
    for record, row in zip(logged, callback.rows, strict=True):
        finite = {f"gradscope/{n}": v for n, v in row.items() if n != "step" and math.isfinite(v)}
        assert {n: v for n, v in record.items() if n.startswith("gradscope/")} == pytest.approx(finite)
    assert 0 < table["seconds"].sum() <= callback.seconds
    begun, told = [line for line in words.splitlines() if line.startswith("gradscope:")]
    assert str(callback.path) in begun
    assert f"measuring took {callback.seconds:.1f} s" in told and "2 measured steps in" in told


def test_a_resumed_training_goes_on_with_the_file_and_a_new_one_starts_it_anew(checkpoint, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    for resume, steps in ((None, [1, 2, 3]), (str(tmp_path / "checkpoint-2"), [1, 2, 3, 4]), (None, [1, 2, 3, 4])):
        trainer, callback, _ = watched(checkpoint, tmp_path, **settings)
        trainer.train(resume_from_checkpoint=resume)
        found = pd.read_parquet(callback.path)
        assert list(found["step"]) == steps
        settings["max_steps"] = 4
    assert callback.seconds < 60


def test_the_callback_refuses_what_it_cannot_measure(checkpoint, tmp_path):
    from gradscope.integrations.trl import GradScopeGRPOTrainer

    two = {"kind": GradScopeGRPOTrainer, "methods": {"lopti_eta": 0.5}, "loss_type": "cispo"}
    with refused("Lopti", "cispo"):
        GradScopeCallback(make_trainer(checkpoint, tmp_path, **two))
    trainer = make_trainer(checkpoint, tmp_path)
    with refused("every"):
        GradScopeCallback(trainer, every=0)
    with refused():
        GradScopeCallback(3)
    trainer.processing_class.backend_tokenizer.normalizer = normalizers.Replace("w", "x")
    with pytest.warns(UserWarning):
        GradScopeCallback(trainer)
    trainer.is_fsdp_enabled = True
    with refused():
        GradScopeCallback(trainer)
