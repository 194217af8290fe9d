"""A policy at the end of training, here the embedded one an optimizer step later."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.measure import words_trained
from analyses.paper.words_trained import by_size, share_weights, weigh
from gradscope import load_policy, measure, sample
from gradscope.gradients import TokenJacobian
from gradscope.intervals import interval_labels


def train_a_step(folder) -> str:
    """The embedded policy after a step of AdamW on made-up gradients, with the optimizer's state."""
    policy, generator = load_policy("embedded"), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3, weight_decay=0.0)
    for weight in policy.model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return str(folder)


@pytest.mark.all
def test_the_end_is_measured_and_its_weights_are_compared_with_the_starts(tmp_path):
    folders = "embedded", train_a_step(tmp_path / "other")
    words_trained.measure(tmp_path / "out", folders=folders, questions=3, task="knights-knaves-compact")

    weights = pd.read_csv(tmp_path / "out" / "weights.csv").set_index("group")
    before, after = (dict(load_policy(folder).model.named_parameters()) for folder in folders)
    changed = sum(int((before[name].bfloat16() != after[name].bfloat16()).sum()) for name in before)
    whole = share_weights(weights.reset_index()).set_index("group").loc["all"]
    assert whole["changed_bfloat16"] == changed > 0
    assert whole["weights"] == sum(weight.numel() for weight in before.values())
    # The first step of AdamW is the rate in each entry, whatever the gradient.
    assert weights["square_change"].to_numpy() == pytest.approx(1e-6 * weights["changed"].to_numpy(), rel=1e-3)

    names = ("tokens", "scaled", "products")
    tokens, scaled, products = (pd.read_parquet(tmp_path / "out" / f"{name}.parquet") for name in names)
    assert tokens["param_grad_norm"].notna().all() and len(scaled) == len(tokens)
    both = scaled["param_grad_norm_adamw"].notna()
    assert scaled.loc[both, "param_grad_norm"].to_numpy() == pytest.approx(
        tokens.loc[both, "param_grad_norm"], rel=1e-4
    )
    assert both.groupby(scaled["interval"]).sum().max() == words_trained.SCALED
    summed = pd.read_parquet(tmp_path / "out" / "summed.parquet")
    assert summed["group"].nunique() == len(words_trained.unflatten(products)) == 9
    along = words_trained.unflatten(products).sum((1, 3))
    assert np.linalg.eigvalsh(along).min() >= -1e-6 * np.trace(along)


@pytest.mark.parametrize(("served", "bounded"), [(5, False), (6, True)])
def test_weightings_have_bounds_if_six_prompts_have_an_advantage(served, bounded):
    rng, group = np.random.default_rng(0), np.repeat(np.arange(8), 5)
    advantage = rng.normal(size=40) * (group < served)
    tokens = pd.DataFrame({"group": group, "advantage": advantage, "weight": advantage, "prob": rng.uniform(size=40)})
    tokens["param_grad_norm"] = rng.lognormal(size=40)
    names = {"cosine": 1.0, "cosine_lower": 0.9, "cosine_upper": 1.0}
    found = weigh(pd.DataFrame([{"method": name, "step": "all"} | names for name in ("grpo", "reweight")]), tokens)
    assert found[["cosine_lower", "cosine_upper"]].notna().all(axis=None) == bounded
    energy, ratio = (tokens["weight"] * tokens["param_grad_norm"]) ** 2, 0.7 + 0.3 * tokens["prob"]
    alone = (ratio * energy).sum() / np.sqrt(energy.sum() * (ratio**2 * energy).sum())
    assert found["cosine_from_energies"].tolist() == pytest.approx([1.0, alone])


def test_the_products_are_those_of_the_weighted_token_gradients():
    policy = load_policy("embedded")
    batch = sample(policy, task="knights-knaves-compact", questions=3, n=3, temperature=1.0, max_new_tokens=12, seed=0)
    tokens = measure(policy, batch, self_check=False)
    tokens["weight"] = np.random.default_rng(0).normal(size=len(tokens))
    products = words_trained.unflatten(words_trained.multiply(policy, batch, tokens))
    kept = torch.tensor(tokens["weight"], dtype=torch.float32)
    cells = [(group, place) for group in sorted(tokens["group"].unique()) for place in range(4)]
    rows = torch.stack([kept * torch.tensor((tokens["group"] == g) & (tokens["interval"] == a)) for g, a in cells])
    vectors = TokenJacobian(policy, batch).vjp(rows).rows.double()
    expected = (vectors @ vectors.T).numpy()
    assert products.reshape(expected.shape) == pytest.approx(expected, abs=1e-5 * expected.max())


def test_batches_of_fewer_prompts_have_the_shares_of_their_own_sums():
    prompts, labels = 8, interval_labels()
    vectors = np.random.default_rng(1).normal(size=(prompts, len(labels), 5)) + 0.5
    found = by_size(np.einsum("pak,qbk->paqb", vectors, vectors))

    def share(batch: tuple[int, ...], place: int) -> float:
        inside, whole = vectors[list(batch), place].sum(0), vectors[list(batch)].sum((0, 1))
        return inside @ whole / (whole @ whole)

    for place, label in enumerate(labels):
        rows = found[found["interval"] == label].set_index("prompts")
        assert rows.loc[1, "mean"] == pytest.approx(np.mean([share((p,), place) for p in range(prompts)]))
        assert rows.loc[8, "mean"] == pytest.approx(share(tuple(range(prompts)), place))
        pairs = [share(pair, place) for pair in combinations(range(prompts), 2)]
        # Four standard errors of as many independent draws; those of a deal share no prompt, and spread less.
        assert abs(rows.loc[2, "mean"] - np.mean(pairs)) < 4 * np.std(pairs) / np.sqrt(rows.loc[2, "batches"])
        assert min(pairs) - 1e-9 <= rows.loc[2, "lower"] < rows.loc[2, "upper"] <= max(pairs) + 1e-9
