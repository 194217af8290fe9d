"""A run of TRL's trainer, its checkpoint and its completions through `gradscope diagnose`, against plain autograd."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.policies import make_tokenizer, save_checkpoint
from support.trl_runs import TEMPERATURE, import_trl, make_trainer, needs_trl, train
from torch import Tensor
from transformers import AutoModelForCausalLM

from gradscope.cli import main

pytestmark = [
    *needs_trl,
    pytest.mark.all,
]

SAVED, CLIP, RATE = 2, 0.05, 1e-3
"""Step of the checkpoint, whose own completions are those of the step after it; a norm that gradients exceed."""
FLOAT32 = 1e-4
"""Shares whose gradients were added up in float32 by two programs; here G is no small difference of large G_a."""
LABELS = ["[0, ¼)", "[¼, ½)", "[½, ¾)", "[¾, 1]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three steps of TRL; a checkpoint after the second one."""
    folder = tmp_path_factory.mktemp("run")
    saves = {"save_strategy": "steps", "save_steps": SAVED, "log_completions": True, "num_completions_to_print": 0}
    steps = {"learning_rate": RATE, "max_grad_norm": CLIP, "weight_decay": 0.1}
    sizes = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 16}
    import_trl()
    checkpoint = save_checkpoint(folder / "policy", "qwen2", sharpness=3.0)  # of tokens in every interval
    train(make_trainer(checkpoint, folder / "trl", **sizes, **steps, **saves))
    return folder / "trl"


@pytest.fixture(scope="module")
def page(run, undrawn) -> Path:
    """What the command writes of the checkpoint."""
    out = run.parent / "report"
    flags = ["--temperature", str(TEMPERATURE), "--max-grad-norm", str(CLIP), "--no-compare"]
    given = ["diagnose", str(run / f"checkpoint-{SAVED}"), "--rollouts", str(run / "completions"), "--out", str(out)]
    assert main([*given, *flags]) in (None, 0)
    return out


@pytest.fixture(scope="module")
def completions(run) -> pd.DataFrame:
    """The responses that the checkpoint sampled, those that have a token."""
    rows = pd.read_parquet(run / "completions" / f"completions_{SAVED + 1:05d}.parquet")
    return rows[rows["completion"].str.strip() != ""].reset_index(drop=True)


@pytest.fixture(scope="module")
def gradients(run, page, completions) -> tuple[Tensor, list[str], list[int]]:
    """(G_a of each interval, flat, [4, P]; the parameters' names; their sizes) in float64, one backward pass each."""
    model = AutoModelForCausalLM.from_pretrained(run / f"checkpoint-{SAVED}").double().eval()
    encode, table = make_tokenizer(), pd.read_parquet(page / "tokens.parquet")
    logprobs, signs = [], []
    for prompt, completion, advantage in completions[["prompt", "completion", "advantage"]].itertuples(index=False):
        before, after = (encode(text)["input_ids"] for text in (prompt, completion))
        ids = torch.tensor([before + after])
        chosen = (model(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logprobs.append(chosen[len(before) - 1 :])
        signs += [advantage] * len(after)
    logprob, weight = torch.cat(logprobs), torch.tensor(signs, dtype=torch.float64)
    np.testing.assert_allclose(table["logprob"], logprob.detach(), atol=1e-5)  # of float32 logits
    np.testing.assert_allclose(table["weight"], weight, rtol=1e-6)  # on-policy, no KL: the advantage of the dump
    interval = torch.tensor(np.minimum(np.floor(4 * table["prob"].to_numpy()), 3))
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = []
    for place in range(4):
        loss = -(weight * logprob)[interval == place].sum() / len(table)
        parts = torch.autograd.grad(loss, parameters, retain_graph=True)
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found), list(names), [p.numel() for p in parameters]


def column(page: Path, statistic: str, metric: str) -> np.ndarray:
    rows = pd.read_csv(page / "data" / "statistics.csv")
    rows = rows[(rows["statistic"] == statistic) & (rows["metric"] == metric)].set_index("interval")
    return rows.loc[LABELS, "value"].to_numpy()


def shares(vectors: Tensor) -> np.ndarray:
    """⟨G_a, G⟩ / ‖G‖²."""
    whole = vectors.sum(0)
    return (vectors @ whole / (whole @ whole)).numpy()


def test_shares_of_tokens_and_squares_are_those_counted_in_the_token_table(page):
    table = pd.read_parquet(page / "tokens.parquet")
    interval = np.minimum(np.floor(4 * table["prob"].to_numpy()), 3)
    squares = (table["weight"].to_numpy(np.float64) * table["param_grad_norm"].to_numpy(np.float64)) ** 2
    counts = np.array([(interval == place).sum() for place in range(4)])
    sums = np.array([squares[interval == place].sum() for place in range(4)])
    assert counts.min() > 0
    np.testing.assert_allclose(column(page, "token_share", "none"), counts / len(table), rtol=1e-12)
    np.testing.assert_allclose(column(page, "squared_share", "raw"), sums / sums.sum(), rtol=1e-9)


def test_shares_of_the_summed_gradient_are_those_of_a_backward_pass_per_interval(page, gradients):
    np.testing.assert_allclose(column(page, "gradient_share", "raw"), shares(gradients[0]), atol=FLOAT32)


def test_shares_in_the_metric_of_adamw_are_those_of_the_saved_moments(run, page, gradients):
    vectors, names, sizes = gradients
    saved = torch.load(run / f"checkpoint-{SAVED}" / "optimizer.pt", weights_only=True)
    # The trainer has two groups: what decays, then biases and norms.
    decays = [not (name.endswith("bias") or "norm" in name) for name in names]
    order = [name for wanted in (True, False) for name, d in zip(names, decays, strict=True) if d is wanted]
    second = {name: saved["state"][place]["exp_avg_sq"].double().flatten() for place, name in enumerate(order)}
    assert [second[name].numel() for name in names] == sizes
    (beta,), eps, steps = {g["betas"][1] for g in saved["param_groups"]}, 1e-8, SAVED + 1
    whole = vectors.sum(0)
    clip = CLIP / (whole.norm() + 1e-6)
    assert clip < 1
    moment = beta * torch.cat([second[name] for name in names]) + (1 - beta) * (clip * whole) ** 2
    metric = clip / ((moment / (1 - beta**steps)).sqrt() + eps)
    np.testing.assert_allclose(column(page, "gradient_share", "adamw"), shares(vectors * metric), atol=FLOAT32)
    assert np.isfinite(column(page, "squared_share", "adamw")).all()
    assert not np.allclose(shares(vectors * metric), shares(vectors), atol=10 * FLOAT32)
