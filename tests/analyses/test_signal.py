"""Experiment A: sums by prompt and group of tokens, against gradients by autograd, one prompt at a time."""

import numpy as np
import pytest
import torch

from analyses.common.experiments import find_run
from analyses.common.measurements import read_table
from analyses.measure import signal
from analyses.paper.signal import tabulate
from gradscope import load_policy
from gradscope.gradients import Resources, TokenJacobian

ROUNDING = 2e-6
"""Of ‖G‖²: whatever the weights' precision, transformers' RMSNorm rounds to float32 (6e-8), in each of nine norms, and
a product of two gradients has both of their errors."""


@pytest.fixture(scope="module")
def small():
    policy = load_policy("embedded", dtype="float64")
    batch = signal.sample_prompts(policy, find_run("cpu", "signal").config, 5)
    return policy, batch


def gradients(policy, batch, weigh):
    """Σ_t weigh(A_t, π_t)·∇ log π_t of each prompt and interval of π, [prompts, 4, P]."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    sums = torch.zeros(5, 4, sum(p.numel() for p in parameters), dtype=torch.float64)
    for row in range(len(batch)):
        ids, mask = batch.input_ids[row], batch.attention_mask[row].bool()
        places = (batch.response_mask[row] & mask).nonzero()[:, 0]
        shift = int(mask.nonzero()[0, 0])
        logits = policy.model(ids[mask][None]).logits[0] / batch.temperature[row].double()
        logs = logits.log_softmax(-1)[places - shift - 1, ids[places]]
        weights = weigh(batch.advantages[row, places].double(), logs.detach().exp())
        intervals = (logs.detach().exp() * 4).long().clamp(max=3)
        for a in range(4):
            total = (weights * logs)[intervals == a].sum()
            if (intervals == a).any():
                found = torch.autograd.grad(total, parameters, retain_graph=True)
                sums[batch.group_ids[row], a] += torch.cat([g.flatten() for g in found])
    return sums


@pytest.mark.all
def test_sums_by_prompt_and_interval_are_those_of_one_gradient_at_a_time(small):
    policy, batch = small
    J = TokenJacobian(policy, batch, Resources(signal.HELD))
    table = signal.sum_signals(J, policy, None, 5)
    G, H = (gradients(policy, batch, weigh) for weigh in (lambda a, p: a, lambda a, p: a * p))
    whole, other = G.sum(1), H.sum(1)
    wanted = {
        "gg": whole @ whole.sum(0),
        "gg_own": (whole * whole).sum(1),
        "hg": other @ whole.sum(0),
        "hg_own": (other * whole).sum(1),
        "gh": whole @ other.sum(0),
        "hh": other @ other.sum(0),
        "hh_own": (other * other).sum(1),
    }
    prompts = table[table["grouping"] == "prompt"]
    size = float(whole.sum(0) @ whole.sum(0))
    for name, values in wanted.items():
        np.testing.assert_allclose(prompts[name], values, atol=ROUNDING * size, rtol=0, err_msg=name)

    n = len(whole)
    signals = torch.stack([(G[:, a] @ whole.sum(0) - (G[:, a] * whole).sum(1)).sum() / (n * (n - 1)) for a in range(4)])
    own = torch.stack([(G[:, a] * whole).sum() / n for a in range(4)])
    found = table[(table["grouping"] == "interval") & (table["left_out"] == -1)]
    np.testing.assert_allclose(found["signal"], [*signals, signals.sum()], atol=ROUNDING * size, rtol=0)
    np.testing.assert_allclose(found["own"], [*own, own.sum()], atol=ROUNDING * size, rtol=0)


@pytest.mark.all
def test_groupings_are_of_every_token_and_their_parts_add_up(small):
    policy, batch = small
    J = TokenJacobian(policy, batch, Resources(signal.HELD))
    table = signal.sum_signals(J, policy, None, None)
    groups = table[table["grouping"] != "prompt"]
    assert set(groups["grouping"]) == {"interval", "position", "entropy", "kind"}
    for _, own in groups.groupby("grouping"):
        parts, whole = own[own["group"] != signal.WHOLE], own[own["group"] == signal.WHOLE]
        assert parts["tokens"].sum() == whole["tokens"].item() == batch.num_tokens
        assert parts["own"].sum() == pytest.approx(whole["own"].item(), rel=1e-9)


def test_groups_without_tokens_have_no_row():
    signals = read_table("signal_words", "signals.csv", scale="words")  # responses end before token 64
    assert (signals.loc[signals["group"] == "64 and later", "tokens"] == 0).all()
    table = tabulate(signals)
    assert list(table.loc[table["grouping"] == "position", "group"]) == ["0 to 15", "16 to 63"]
    assert table[["token_share", "signal_share", "noise_scale_upper"]].notna().all(axis=None)
