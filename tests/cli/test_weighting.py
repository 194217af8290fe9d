"""`--weighting`: the update of every command, against autograd of the printed loss, from rows to numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from support import cli
from support.policies import make_policy, make_responses, save_checkpoint, write_jsonl
from torch import Tensor
from torch.nn.functional import logsigmoid

from gradscope.gradients import interval_gradients, measure
from gradscope.objective import LossSettings
from gradscope.policy import load_policy
from gradscope.rollouts import read_rollouts, write_rollouts
from gradscope.updates import StepSettings, apply_update, audit, influence

PAIRS, RATE = 6, 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("weighting") / "policy", "qwen2")


@pytest.fixture(scope="module")
def rows(folder):
    """Six pairs with a reference, a teacher, and log π of a sampler near this policy; no reward."""
    policy = make_policy("qwen2")
    settings = {"lengths": (5, 8) * PAIRS, "prompt_lengths": (4,) * (2 * PAIRS), "holes": False}
    made = []
    for i, own in enumerate(make_responses(policy, **settings)):
        row = {"prompt_ids": own.prompt_ids, "response_ids": own.response_ids, "old_logprobs": own.old_logprobs}
        away = np.random.default_rng(i).normal(0, 0.4, len(own.response_ids))
        row |= {"ref_logprobs": own.ref_logprobs, "teacher_logprobs": np.minimum(own.old_logprobs + away, 0).tolist()}
        made.append(row | {"pair": i // 2, "chosen": i % 2 == 0})
    return made


@pytest.fixture(scope="module")
def file(folder, rows):
    return write_jsonl(folder.parent / "rows.jsonl", rows)


def logprobs(model: torch.nn.Module, row: dict) -> Tensor:
    ids, start = torch.tensor(row["prompt_ids"] + row["response_ids"]), len(row["prompt_ids"])
    found = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1].double().log_softmax(-1)
    return found.gather(1, ids[start:, None])[:, 0]


def printed(name: str, model: torch.nn.Module, rows: list[dict]) -> Tensor:
    """The loss as it is printed, a mean over tokens or pairs."""
    each = [logprobs(model, row) for row in rows]
    every = torch.cat(each)
    logged = {n: torch.tensor([x for row in rows for x in row[n]]) for n in ("old_logprobs", "teacher_logprobs")}
    if name == "sft":
        return -every.mean()
    if name == "dpo":
        away = [own.sum() - sum(row["ref_logprobs"]) for own, row in zip(each, rows, strict=True)]
        return -logsigmoid(0.1 * (torch.stack(away[0::2]) - torch.stack(away[1::2]))).mean()
    advantage = logged["teacher_logprobs"] - every.detach()
    return -((every - logged["old_logprobs"]).exp() * advantage).mean()


NAMES = ("sft", "dpo", "opd")


@pytest.fixture(scope="module", params=NAMES)
def case(request, folder, rows):
    """A loss's name, the policy, and the loss's gradient by parameter, from one call of autograd."""
    policy = load_policy(folder)
    gradients = torch.autograd.grad(printed(request.param, policy.model, rows), [*policy.model.parameters()])
    named = zip((name for name, _ in policy.model.named_parameters()), gradients, strict=True)
    return request.param, policy, dict(named)


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.cat([own.flatten().double() for own in gradients.values()]).norm())


def test_the_summed_gradient_is_that_of_the_printed_loss(case, rows, file):
    name, policy, gradients = case
    found = interval_gradients(policy, read_rollouts(file, policy), loss=LossSettings(weighting=name))
    assert found.table["norm"].iloc[-1] == pytest.approx(norm(gradients), rel=1e-5)


def test_audit_finds_the_printed_losss_gradient_right(case, rows, file):
    name, policy, gradients = case
    found = audit(policy, read_rollouts(file, policy), gradients, loss=LossSettings(weighting=name))
    assert found.kind == "same" and found.fault is None
    wrong = {key: own * (-1 if "norm" in key else 1) for key, own in gradients.items()}
    assert audit(policy, read_rollouts(file, policy), wrong, loss=LossSettings(weighting=name)).kind != "same"


def test_a_real_step_is_the_printed_losss_and_the_predicted_one_is_near_it(case, rows, file):
    name, policy, gradients = case
    batch, loss = read_rollouts(file, policy), LossSettings(weighting=name)
    step = StepSettings("sgd", RATE, 0.0, max_grad_norm=None)
    moved = apply_update(policy, batch, loss=loss, step=step, displacement=True)
    flat = torch.cat([gradients[key].flatten() for key, _ in policy.model.named_parameters()])
    ulp = 2**-23 * max(float(own.detach().abs().max()) for own in policy.model.parameters())  # of a moved weight
    torch.testing.assert_close(moved.displacement, -RATE * flat, rtol=1e-3, atol=ulp)
    assert torch.cosine_similarity(moved.displacement, -flat, dim=0) > 0.999
    change = (moved.after.logprob - moved.before.logprob)[batch.response_mask].numpy()
    predicted = influence(policy, batch, loss=loss, step=step).contributions["predicted"].to_numpy()
    assert np.corrcoef(change, predicted)[0, 1] > 0.99 and abs(np.polyfit(predicted, change, 1)[0] - 1) < 0.05


@pytest.mark.parametrize("limit", [(), ("--minutes", "5")])
def test_the_tables_weights_are_the_losss_and_its_own_rows_are_read_again(case, file, folder, tmp_path, limit):
    name, policy, _ = case
    cli.run("measure", folder, file, "--weighting", name, "--out", tmp_path / "out", "--no-figures", *limit)
    table = pd.read_parquet(tmp_path / "out/tokens.parquet")
    assert table["weight"].notna().all() and (table["policy_weight"] == table["weight"]).all()
    assert (table["kl_weight"] == 0).all() and table["advantage"].notna().all()
    own = measure(policy, read_rollouts(file, policy), weighting=name, tokens=torch.zeros(0, dtype=torch.long))
    np.testing.assert_allclose(table["weight"], own["weight"], rtol=1e-5, atol=1e-6)
    columns = {"sft": set(), "dpo": {"pair", "chosen"}, "opd": {"teacher_logprob"}}
    assert columns[name] <= {*table}


def test_a_log_that_names_its_loss_needs_no_flag(case, rows, folder, tmp_path):
    name, policy, _ = case
    file = write_rollouts(tmp_path / "rows.parquet", rows, loss={"weighting": name})
    named = measure(policy, file, tokens=torch.zeros(0, dtype=torch.long))
    given = measure(policy, read_rollouts(file, policy), weighting=name, tokens=torch.zeros(0, dtype=torch.long))
    pd.testing.assert_frame_equal(named, given)


def test_compare_names_the_update_and_composes_others_with_it(file, folder, tmp_path):
    """reweight:alpha=0 is the update itself; the mask leaves its weights out below ¼."""
    flags = ("--update", "dpo", "--weightings", "reweight:alpha=0", "mask:low=0,high=.25", "sft")
    cli.run("compare", folder, file, *flags, "--out", tmp_path / "out")
    told = pd.read_csv(tmp_path / "out/compare.csv")
    assert list(dict.fromkeys(told["method"])) == ["dpo", "reweight:alpha=0", "mask:low=0,high=.25", "sft"]
    same = told.loc[told["method"] == "reweight:alpha=0", "same_as"].unique()
    assert same.tolist() == ["dpo"]
    weights = pd.read_parquet(tmp_path / "out/weights.parquet")
    table = pd.read_parquet(tmp_path / "out/tokens.parquet")
    expected = np.where(table["old_logprob"].map(np.exp) < 0.25, 0.0, table["weight"])
    np.testing.assert_allclose(weights["mask:low=0,high=.25"], expected, rtol=1e-6)
    assert (weights["sft"] == weights["sft"].iloc[0]).all()
    assert "GRPO" not in (tmp_path / "out/summary.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "without", "word"),
    [
        ("dpo", "pair", "`pair`"),
        ("kto:z0=0", "chosen", "`chosen`"),
        ("dpo", "ref_logprobs", "ref_logprob"),
        ("opd", "teacher_logprobs", "teacher_logprob"),
        ("lopti", "", "two optimizer steps"),
        ("dp0", "", "did you mean dpo?"),
    ],
)
def test_what_a_loss_needs_is_named_in_one_line(name, without, word, rows, folder, tmp_path, capsys):
    changed = [{key: own for key, own in row.items() if key != without} for row in rows]
    file = write_jsonl(tmp_path / "rows.jsonl", changed)
    ended = cli.outcome_of(capsys, "measure", folder, file, "--weighting", name, "--out", tmp_path / "out")
    assert ended.status == 2 and word in ended.err and not (tmp_path / "out").exists()
