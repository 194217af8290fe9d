"""Shares against the batch's size: of planted prompts, of a sum over all pairs, and at a measured batch's own size."""

import numpy as np
import pytest
import torch
from support.policies import make_batch, make_policy

from analyses.common.batch_share import BatchShare, noise_scale
from gradscope.gradients import TokenJacobian


def plant(generator: np.random.Generator, kinds: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """A prompt is one of a few kinds, all equally likely, with gradients of tokens a and of all, [kinds, 3] each."""
    parts, others = generator.normal(size=(2, kinds, 3))
    return parts, parts + others + 0.5


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_the_share_is_the_ratio_of_means_over_all_batches(prompts):
    parts, whole = plant(np.random.default_rng(prompts))
    kinds = np.stack(np.meshgrid(*[np.arange(5)] * prompts), -1).reshape(-1, prompts)  # all batches, equally likely
    sums = whole[kinds].sum(1)
    expected = (parts[kinds].sum(1) * sums).sum() / (sums**2).sum()
    mean, mean_part = whole.mean(0), parts.mean(0)
    own = (parts * whole).sum(1).mean(), (whole**2).sum(1).mean()
    share = BatchShare(mean_part @ mean, own[0], mean @ mean, own[1])
    assert share.at(prompts) == pytest.approx(expected, rel=1e-12)
    noise = (share.own - share.signal) / (share.whole_own - share.whole_signal)
    scale = noise_scale(share.whole_signal, share.whole_own)
    weighted = (prompts * share.limit + scale * noise) / (prompts + scale)
    assert weighted == pytest.approx(expected, rel=1e-12)


def test_at_the_measured_batchs_own_size_it_is_the_share_of_the_gradient():
    policy = make_policy("gpt2", torch.float64)
    J = TokenJacobian(policy, make_batch(policy))
    weights = torch.randn(J.num_tokens, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    labels = (J.kept(J.statistics.logprob) < -1.0).long()
    found = J.contributions(weights)
    sums = found.grouped(labels)
    for a in (0, 1):
        share = BatchShare(sums.signal[a], sums.own[a], sums.signal[-1], sums.own[-1])
        assert share.at(found.num_prompts) == pytest.approx(found.gradient_share[labels == a].sum().item(), rel=1e-9)


@pytest.mark.parametrize(("signal", "own"), [(2.0, 10.0), (1.0, 80.0), (-1.0, 10.0)])
def test_the_share_goes_to_the_signals_without_crossing_it_and_crosses_a_level_once(signal, own):
    share = BatchShare(signal, own, 4.0, 100.0)
    found = [share.at(n) for n in 1 + np.arange(0, 3000, 7)]
    steps = np.diff(found) * np.sign(share.limit - found[0])
    assert (steps > 0).all() and abs(found[-1] - share.limit) < 0.02
    for level in np.linspace(-1, 1, 41) + 1e-3:
        crossed = share.crossing(level)
        between = min(found[0], share.limit) < level < max(found[0], share.limit)
        assert (crossed is not None) == between
        if between:
            assert share.at(crossed) == pytest.approx(level, rel=1e-9)


def test_without_signal_there_is_no_limit_and_no_crossing():
    share = BatchShare(1.0, 10.0, -0.5, 100.0)
    assert np.isnan(share.limit) and share.crossing(0.3) is None
    assert noise_scale(0.0, 100.0) == noise_scale(-0.5, 100.0) == np.inf
