"""What gradscope changes of a verl policy loss, without verl; test_verl.py runs verl's own functions."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from support.refusals import refused

from gradscope.integrations.verl.methods import changed_policy_loss, check_methods, pass_loss, pass_mask
from gradscope.objective import lopti_split, make_weighting, token_weights
from gradscope.objective.equations import policy_loss

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.24}

VANILLA_SIGNATURE = {
    "old_log_prob": inspect.Parameter.empty,
    "log_prob": inspect.Parameter.empty,
    "advantages": inspect.Parameter.empty,
    "response_mask": inspect.Parameter.empty,
    "loss_agg_mode": "token-mean",
    "config": None,
    "rollout_is_weights": None,
}
"""Name and default of each argument of verl 0.9.1's compute_policy_loss_vanilla, read from its source."""


def settings(**given):
    off = {"reweight_alpha": None, "lopti_eta": None, "lopti_pass": None, "lopti_order": "low-first", "weighting": None}
    return SimpleNamespace(**(off | given))


def make_batch(seed=0, rows=4, length=7):
    """log π_old, log π, Â, mask [B, T] in float64; a token has π_old = ½ exactly, the edge of η = ½."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.rand(rows, length, generator=generator, dtype=torch.float64).clamp(min=0.02).log()
    old[0, 0] = torch.tensor(0.5, dtype=torch.float64).log()
    new = old + 0.2 * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, length)
    mask = torch.arange(length) < torch.tensor([length, 5, 3, 1])[:, None]
    return old, new, advantages, mask


def whole_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
    """Stands in for verl's vanilla: Eq. 1 over all tokens of the mask."""
    count = int(response_mask.sum())
    return policy_loss(log_prob, old_log_prob, advantages, response_mask, **CLIPS, num_tokens=count), {}


class Config(SimpleNamespace):
    """Read as verl's are, by attribute and by `get`."""

    clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c = 0.5, 0.2, 0.24, 3.0

    def get(self, name, default=None):
        return getattr(self, name, default)


def changed(batch, **given):
    old, new, advantages, mask = batch
    config = Config(policy_loss=settings(**given))
    return changed_policy_loss(whole_loss, old, new, advantages, mask, config=config)[0]


def test_signature_check_our_loss_takes_what_verl_0_9_1_passes_to_vanilla():
    ours = list(inspect.signature(changed_policy_loss).parameters.values())[1:]
    assert {parameter.name: parameter.default for parameter in ours} == VANILLA_SIGNATURE


def test_reweight_is_eq_4_by_a_loop_over_tokens():
    old, new, advantages, mask = make_batch()
    total = 0.0
    for b, t in mask.nonzero().tolist():
        a = float((0.3 * old[b, t].exp() + 0.7) * advantages[b, t])
        ratio = float((new[b, t] - old[b, t]).exp())
        total -= min(ratio * a, min(max(ratio, 0.8), 1.24) * a)
    loss = float(changed(make_batch(), reweight_alpha=0.3))
    assert loss == pytest.approx(total / int(mask.sum()), abs=1e-12)  # float64, sums of 16 terms
    assert abs(loss - float(changed(make_batch()))) > 1e-3


@pytest.mark.parametrize("name", ["low", "high"])
def test_a_pass_alone_has_the_gradient_of_its_tokens_over_the_count_of_all(name):
    old, new, advantages, mask = make_batch()
    chosen = dict(zip(("low", "high"), lopti_split(old, mask, eta=0.5), strict=True))[name]
    assert 0 < int(chosen.sum()) < int(mask.sum())
    gradients = []
    for loss in (
        lambda x: changed((old, x, advantages, mask), lopti_eta=0.5, lopti_pass=name),
        lambda x: policy_loss(x, old, advantages, chosen, **CLIPS, num_tokens=int(mask.sum())),
    ):
        x = new.clone().requires_grad_()
        loss(x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-15)  # the same few operations
    assert not gradients[0][~chosen].any()


@pytest.mark.parametrize("name", ["cispo:eps_high=1.05", "sapo", "gspo:eps_low=0.02,eps_high=0.02", "mask", "kl-cov"])
def test_under_a_weighting_the_slope_is_its_weight_over_the_count_of_all(name):
    old, new, advantages, mask = batch = make_batch()
    new = new.clone().requires_grad_(True)
    loss = changed((old, new, advantages, mask), weighting=name)
    (slope,) = torch.autograd.grad(loss, new)
    columns = {"response": mask.nonzero()[:, 0], "logprob": new.detach()[mask], "old_logprob": old[mask]}
    columns["advantage"] = advantages[mask]
    plain = token_weights(new.detach(), old, advantages, mask, **CLIPS, clip_ratio_c=3.0, num_tokens=1)
    columns = {name: values.numpy() for name, values in (columns | {"policy_weight": plain[mask]}).items()}
    (wanted,) = make_weighting(name).weights(columns).values()
    torch.testing.assert_close(-slope[mask] * int(mask.sum()), torch.from_numpy(wanted), rtol=1e-12, atol=1e-14)
    assert not slope[~mask].any() and not torch.equal(
        slope, torch.autograd.grad(changed((old, new, *batch[2:])), new)[0]
    )


def test_masks_of_nested_rows_are_those_of_the_padded_ones():
    old, _, _, mask = make_batch()
    mask[1, 2] = False  # a hole, such as a tool's output
    lengths = [7, 5, 3, 1]

    def nested(tensor):
        return torch.nested.as_nested_tensor(
            [row[:n] for row, n in zip(tensor, lengths, strict=True)], layout=torch.jagged
        )

    for name in ("low", "high"):
        found = pass_mask(nested(old), nested(mask), eta=0.5, name=name)
        assert torch.equal(found.to_padded_tensor(False).bool(), pass_mask(old, mask, eta=0.5, name=name))


def test_a_pass_changes_the_micro_batch_for_the_loss_alone():
    old, _, _, mask = make_batch()
    data, seen = {"old_log_probs": old, "response_mask": mask}, []
    loss = pass_loss(lambda *, model_output, data: seen.append(data["response_mask"]), eta=0.5, name="low")
    loss(model_output=None, data=data)
    assert torch.equal(seen[0], mask & (old.exp() < 0.5)) and data["response_mask"] is mask


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"reweight_alpha": 1.5}, "reweight_alpha"),
        ({"lopti_eta": -0.1}, "eta"),
        ({"lopti_eta": 0.5, "lopti_order": "high"}, "lopti_order"),
        ({"lopti_eta": 0.5, "lopti_pass": "middle"}, "lopti_pass"),
        ({"lopti_pass": "low"}, "lopti_pass"),
        ({"weighting": "cispos"}, "cispo"),
        ({"weighting": "top-entropy"}, "entropy"),
        ({"weighting": "icepop"}, "sampler_logprob"),
        ({"weighting": "lopti"}, "reweight_alpha"),
        ({"weighting": "random-split"}, "random-split"),
        ({"weighting": "cispo", "reweight_alpha": 0.3}, "weighting"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, named):
    with refused(named):
        check_methods(settings(**given))
