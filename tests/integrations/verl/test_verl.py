"""gradscope inside verl, by verl's own functions; without verl all of this is skipped (test_verl_methods.py is not)."""

import os
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest

with warnings.catch_warnings():
    # OTHERS: verl names the engines that are not installed, and what its dependencies deprecate.
    warnings.simplefilter("ignore")
    pytest.importorskip("verl.workers.engine", reason="verl is not installed: it needs an environment of its own")

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric, reduce_metrics
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.utils import postprocess_batch_func
from verl.workers.utils.losses import ppo_loss

from gradscope.integrations import verl_engine
from gradscope.integrations.verl import GradScopePolicyLossConfig
from gradscope.integrations.verl_engine import LoptiFSDPEngine, LoptiPasses
from gradscope.objective import WEIGHTINGS, lopti_split, make_weighting, reweight, token_weights
from gradscope.objective.equations import policy_loss

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.24, "clip_ratio_c": 3.0}
VOCAB, PROMPT, LENGTHS = 11, 2, (6, 3, 5, 1)


def make_config(**given):
    kept = {name: given.pop(name) for name in list(given) if name in ("loss_agg_mode", "use_kl_loss", "kl_loss_coef")}
    methods = GradScopePolicyLossConfig(**given)
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2, **CLIPS, policy_loss=methods, **kept
    )


def make_tensors(seed=0):
    """log π_old, log π, Â and the mask, [B, T], float64."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    old = torch.rand(mask.shape, generator=generator, dtype=torch.float64).clamp(min=0.02).log()
    new = old + 0.3 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), 1, generator=generator, dtype=torch.float64).expand(mask.shape)
    return old, new, advantages, mask


def value_and_gradient(loss, new):
    new = new.clone().requires_grad_()
    value = loss(new)
    value.backward()
    return value.detach(), new.grad


def registered(old, advantages, mask, config):
    """The loss as verl's ppo_loss calls it."""
    return lambda new: get_policy_loss_fn("gradscope")(
        old_log_prob=old,
        log_prob=new,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None,
    )[0]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_with_everything_off_the_loss_is_verls_vanilla_bit_for_bit(mode):
    old, new, advantages, mask = make_tensors()
    config = make_config(loss_agg_mode=mode)
    value, gradient = value_and_gradient(registered(old, advantages, mask, config), new)
    vanilla = value_and_gradient(
        lambda x: compute_policy_loss_vanilla(old, x, advantages, mask, loss_agg_mode=mode, config=config)[0], new
    )
    assert torch.equal(value, vanilla[0]) and torch.equal(gradient, vanilla[1])


def test_with_alpha_the_loss_is_gradscopes_at_reweighted_advantages():
    old, new, advantages, mask = make_tensors()
    value, gradient = value_and_gradient(registered(old, advantages, mask, make_config(reweight_alpha=0.3)), new)
    changed = reweight(advantages, old, alpha=0.3)
    ours = value_and_gradient(lambda x: policy_loss(x, old, changed, mask, **CLIPS, num_tokens=int(mask.sum())), new)
    # float64, sums of 15 terms of size 1; 1e-12 is far above their rounding.
    torch.testing.assert_close(value, ours[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, ours[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_under_a_weighting_the_slopes_are_its_weights_and_the_metrics_verls_own(mode):
    old, new, advantages, mask = make_tensors()
    config = make_config(weighting="cispo:eps_high=1.1", loss_agg_mode=mode)
    leaf = new.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn("gradscope")(
        old_log_prob=old, log_prob=leaf, advantages=advantages, response_mask=mask, loss_agg_mode=mode, config=config
    )
    loss.backward()
    wanted = (new - old).exp().clamp(max=1.1) * advantages * mask
    wanted = wanted / (mask.sum() if mode == "token-mean" else len(mask))
    torch.testing.assert_close(-leaf.grad, wanted, rtol=1e-12, atol=1e-14)
    plain = compute_policy_loss_vanilla(
        old_log_prob=old, log_prob=new, advantages=advantages, response_mask=mask, loss_agg_mode=mode, config=config
    )[1]
    assert metrics == plain


LOSSES = {
    "grpo": ("vanilla", {}),
    "clip-cov:share=1,low=0.02,high=0.5": (
        "clip_cov",
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.02, "clip_cov_ub": 0.5},
    ),
    "kl-cov:share=0.3,beta=0.6": ("kl_cov", {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.6}),
    "cispo:eps_low=0.8,eps_high=1.24": ("cispo", {}),
    "sapo:tau_pos=2,tau_neg=1.5": ("sapo", {"tau_pos": 2.0, "tau_neg": 1.5}),
    "gspo:eps_low=0.05,eps_high=0.1": ("gspo", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}),
    "gmpo:eps_low=0.05,eps_high=0.1": ("geo_mean", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}),
    "dppo-tv:delta=0.05,cap=1.2": ("dppo_tv", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 1.2}),
    "dppo-kl:delta=0.01,cap=1.2": ("dppo_kl", {"clip_ratio_low": 0.01, "clip_ratio_high": 0.01, "clip_ratio_c": 1.2}),
    "dro:beta=0.7": ("dro", {"dro_beta": 0.7}),
}
"""Weighting → verl's loss_mode, and its settings."""
BY_RESPONSE = ("sapo", "gspo", "gmpo")
"""Those that verl averages over responses."""
CORRECTIONS = {
    "tis:high=1.1": ("token", 1.1),
    "icepop:low=0.8,high=1.3": ("token", "0.8_1.3"),
    "sequence-tis:high=1.1": ("sequence", 1.1),
    "sequence-mask:low=0.5,high=1.2": ("sequence", "0.5_1.2"),
}
"""Weighting → verl's rollout_is, and its threshold."""


def columns_of(old, new, advantages, mask, sampler):
    """Those of a token table, of the kept tokens."""
    plain = token_weights(new, old, advantages, mask, **CLIPS, num_tokens=1)
    columns = {"logprob": new, "old_logprob": old, "sampler_logprob": sampler, "advantage": advantages}
    columns = {name: values[mask].numpy() for name, values in (columns | {"policy_weight": plain}).items()}
    return columns | dict(zip(("response", "position"), mask.nonzero().T.numpy(), strict=True))


def verl_slopes(mode, old, new, advantages, mask, *, weights=None, **settings):
    """−N · ∂loss/∂ log π of each kept token, of verl's own loss."""
    own = {name: settings.pop(name) for name in list(settings) if name.startswith(("clip_ratio", "tau"))}
    losses = PolicyLossConfig(loss_mode=mode, **settings)
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2, policy_loss=losses, **CLIPS | own
    )
    aggregation = "seq-mean-token-mean" if mode in ("sapo", "gspo", "geo_mean") else "token-mean"
    _, gradient = value_and_gradient(
        lambda x: get_policy_loss_fn(mode)(
            old_log_prob=old, log_prob=x, advantages=advantages, response_mask=mask.double(),
            loss_agg_mode=aggregation, config=config, rollout_is_weights=weights,
        )[0],
        new,
    )  # fmt: skip
    return -(gradient * mask.sum())[mask].numpy()


@pytest.mark.parametrize("seed", range(3))
def test_weightings_are_those_of_verls_losses(seed):
    old, new, advantages, mask = make_tensors(seed)
    new = torch.where(new > 0, old, new)  # probabilities, without ties
    columns, different = columns_of(old, new, advantages, mask, old), 0
    for name, (mode, settings) in LOSSES.items():
        kind = "sequence" if name.startswith(BY_RESPONSE) else "token-mean"
        found = make_weighting(name).weights(columns, aggregation=kind)["all"]
        wanted = verl_slopes(mode, old, new, advantages, mask, **settings)
        # float64; verl divides by counts + 1e-8.
        np.testing.assert_allclose(found, wanted, rtol=3e-8, atol=1e-12, err_msg=name)
        different += not np.allclose(found, make_weighting("grpo").weights(columns, aggregation=kind)["all"])
    assert different == len(LOSSES) - 1


@pytest.mark.parametrize("seed", range(3))
def test_corrections_for_the_sampler_are_verls(seed):
    old, new, advantages, mask = make_tensors(seed)
    noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(seed), dtype=old.dtype)
    columns = columns_of(old, new, advantages, mask, sampler := (old + 0.2 * noise).clamp(max=0))
    for name, (level, threshold) in CORRECTIONS.items():
        weights, _ = compute_rollout_correction_weights(
            old - sampler, mask.double(), rollout_is=level, rollout_is_threshold=threshold
        )
        wanted = verl_slopes("vanilla", old, new, advantages, mask, weights=weights)
        np.testing.assert_allclose(make_weighting(name).weights(columns)["all"], wanted, rtol=1e-12, err_msg=name)


def test_those_said_to_be_held_against_verls_losses_are():
    said = {name for name, kind in WEIGHTINGS.items() if {"verl", "verl's corrections"} & {*kind.OWN_LOSSES}}
    assert {name.partition(":")[0] for name in (*LOSSES, *CORRECTIONS)} == said


def test_a_group_alone_has_gradient_where_lopti_split_says_and_all_denominators():
    old, new, advantages, mask = make_tensors()
    groups = dict(zip(("low", "high"), lopti_split(old, mask, eta=0.5), strict=True))
    _, whole = value_and_gradient(registered(old, advantages, mask, make_config()), new)
    for name, group in groups.items():
        config = make_config(lopti_eta=0.5, lopti_pass=name)
        _, gradient = value_and_gradient(registered(old, advantages, mask, config), new)
        assert torch.equal(gradient, torch.where(group, whole, 0.0))


@pytest.mark.parametrize(("vendor", "engine"), [("gradscope", LoptiFSDPEngine), ("nvidia", FSDPEngineWithLMHead)])
def test_the_registry_gives_our_engine_to_whom_asks_for_it_alone(monkeypatch, vendor, engine):
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    for strategy in ("fsdp", "fsdp2"):
        assert EngineRegistry.get_engine_cls("language_model", strategy) is engine
    assert issubclass(EngineRegistry.get_engine_cls("value_model", "fsdp"), FSDPEngineWithLMHead)


class BigramEngine(BaseEngine):
    """The least engine of verl that trains: a table of logits [V, V] in float64, SGD, micro-batches, clipping."""

    def __init__(self, table, micro_batch_size=2, max_grad_norm=0.05):
        self.table = table.clone().requires_grad_()
        self.optimizer = torch.optim.SGD([self.table], lr=1.0)
        self.micro_batch_size, self.max_grad_norm, self.steps = micro_batch_size, max_grad_norm, 0

    def optimizer_zero_grad(self):
        self.optimizer.zero_grad()

    def optimizer_step(self):
        norm = torch.nn.utils.clip_grad_norm_([self.table], self.max_grad_norm)
        self.optimizer.step()
        self.steps += 1
        return norm.item()

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        tu.assign_non_tensor(data, batch_num_tokens=int(data["loss_mask"].values().sum()), dp_size=1)
        outputs = []
        for part in tu.chunk_tensordict(data, len(data) // self.micro_batch_size):
            ids = part["input_ids"].values()
            following = ids.roll(-1)
            logprobs = self.table[ids].log_softmax(-1).gather(1, following[:, None])[:, 0]
            nested = torch.nested.nested_tensor_from_jagged(logprobs, offsets=part["input_ids"].offsets())
            loss, metrics = loss_function(model_output={"log_probs": nested}, data=part, dp_group=None)
            loss.backward()
            outputs.append({"loss": loss.item(), "metrics": metrics})
        return postprocess_batch_func(outputs, None, data)

    def is_mp_src_rank_with_outputs(self):
        return True

    def get_data_parallel_group(self):
        return None


class TwoPassBigramEngine(LoptiPasses, BigramEngine):
    """The same with Lopti's passes."""


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """One process on the CPU that all-reduces with itself, as verl's engines ask."""
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verl_engine, "get_device_id", lambda: "cpu")  # verl's own wants a GPU
        yield
    torch.distributed.destroy_process_group()


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def sample(seed=0):
    """A table of logits and what verl would hand to an actor: ids, masks, old and reference log π, advantages."""
    generator = torch.Generator().manual_seed(seed)
    table = 2 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    ids = [torch.randint(VOCAB, (PROMPT + n,), generator=generator) for n in LENGTHS]

    def logprobs(noise):
        moved = table + noise * torch.randn(table.shape, generator=generator, dtype=torch.float64)
        return [moved[row[PROMPT - 1 : -1]].log_softmax(-1).gather(1, row[PROMPT:, None])[:, 0] for row in ids]

    tensors = {
        "input_ids": ids,
        "prompts": [row[:PROMPT] for row in ids],
        "responses": [row[PROMPT:] for row in ids],
        "response_mask": [torch.ones(n, dtype=torch.int64) for n in LENGTHS],
        "loss_mask": [torch.cat([torch.zeros(PROMPT), torch.ones(n)]) for n in LENGTHS],
        "old_log_probs": logprobs(0.3),
        "ref_log_prob": logprobs(0.5),
        "advantages": [torch.randn((), generator=generator, dtype=torch.float64).expand(n).clone() for n in LENGTHS],
    }
    others = {"global_batch_size": len(LENGTHS), "use_dynamic_bsz": False}
    return table, tensors, lambda: tu.get_tensordict({k: nested(v) for k, v in tensors.items()}, others)


def by_hand(table, tensors, groups, *, alpha=None, kl_coef=0.01, max_grad_norm=0.05):
    """SGD steps on gradscope's loss, one per group of tokens (lists of bool), each clipped; all tokens count."""
    table, total = table.clone(), sum(LENGTHS)
    for group in groups:
        x = table.clone().requires_grad_()
        loss = 0.0
        for ids, old, ref, advantage, chosen in zip(
            *(tensors[k] for k in ("input_ids", "old_log_probs", "ref_log_prob", "advantages")), group, strict=True
        ):
            new = x[ids[PROMPT - 1 : -1]].log_softmax(-1).gather(1, ids[PROMPT:, None])[:, 0]
            a = advantage if alpha is None else (alpha * old.exp() + 1 - alpha) * advantage
            loss = loss + policy_loss(
                new[None], old[None], a[None], chosen[None], **CLIPS, ref_logprobs=ref[None], kl_coef=kl_coef,
                num_tokens=total,
            )  # fmt: skip
        loss.backward()
        table -= x.grad * min(1.0, max_grad_norm / (float(x.grad.norm()) + 1e-6))  # torch's 1e-6
    return table


def train(engine, make_data, **given):
    config = make_config(use_kl_loss=True, kl_loss_coef=0.01, **given)
    return engine.train_batch(make_data(), partial(ppo_loss, config=config))


@pytest.mark.parametrize("order", ["low-first", "high-first"])
def test_two_passes_are_two_clipped_steps_on_the_two_groups(process_group, order):
    table, tensors, make_data = sample()
    engine = TwoPassBigramEngine(table)
    output = train(engine, make_data, reweight_alpha=0.3, lopti_eta=0.5, lopti_order=order)
    low = [old.exp() < 0.5 for old in tensors["old_log_probs"]]
    groups = [low, [~row for row in low]]
    groups = groups if order == "low-first" else groups[::-1]
    expected = by_hand(table, tensors, groups, alpha=0.3)
    assert engine.steps == 2
    assert (expected - by_hand(table, tensors, groups[::-1], alpha=0.3)).abs().max() > 1e-6  # so the order is seen
    # float64; k3 is clamped to ±10 in verl, out of reach here.
    torch.testing.assert_close(engine.table.detach(), expected, rtol=0, atol=1e-12)
    metrics = reduce_metrics(dict(output["metrics"]))
    assert metrics["lopti/tokens_low"] == sum(int(row.sum()) for row in low)
    assert metrics["lopti/tokens_low"] + metrics["lopti/tokens_high"] == sum(LENGTHS)
    last = "high" if order == "low-first" else "low"
    assert metrics["lopti/grad_norm_" + last] == output["metrics"]["grad_norm"]
    assert isinstance(output["metrics"]["actor/pg_loss"], Metric) and len(output["loss"]) == 4


def test_without_eta_the_engine_is_verls_bit_for_bit(process_group):
    table, tensors, make_data = sample()
    engines = [TwoPassBigramEngine(table), BigramEngine(table)]
    for engine in engines:
        train(engine, make_data, reweight_alpha=0.3)
    assert torch.equal(engines[0].table, engines[1].table) and engines[0].steps == 1
    everything = [[torch.ones(n, dtype=torch.bool) for n in LENGTHS]]
    expected = by_hand(table, tensors, everything, alpha=0.3)
    torch.testing.assert_close(engines[0].table.detach(), expected, rtol=0, atol=1e-12)


def test_a_pass_without_tokens_takes_no_step(process_group):
    table, tensors, make_data = sample()
    engine = TwoPassBigramEngine(table)
    output = train(engine, make_data, lopti_eta=1.0)  # every probability is below 1
    everything = [[torch.ones(n, dtype=torch.bool) for n in LENGTHS]]
    assert engine.steps == 1 and "lopti/grad_norm_high" not in output["metrics"]
    torch.testing.assert_close(engine.table.detach(), by_hand(table, tensors, everything), rtol=0, atol=1e-12)


def test_verl_loads_both_modules_by_its_environment_variable():
    modules = "gradscope.integrations.verl,gradscope.integrations.verl_engine"
    code = "import verl\nfrom verl.trainer.ppo.core_algos import get_policy_loss_fn\nget_policy_loss_fn('gradscope')"
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": modules, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
