"""`measure --of`: tables of other quantities' gradients, against autograd by token, and what does not apply there."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from support import cli
from support.oracle import in_float64
from support.policies import make_policy, make_responses, save_checkpoint
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients import measure
from gradscope.objective import Divergence
from gradscope.policy import load_policy
from gradscope.rollouts import TokenBatch, read_rollouts, write_rollouts
from gradscope.updates import compare

TOP = 4
FLOAT32 = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy, a teacher, rollouts, and the same with the teacher's likeliest tokens at each."""
    folder, given = tmp_path_factory.mktemp("of"), {"lengths": (5, 3, 6), "prompt_lengths": (4,) * 3, "holes": False}
    for name, seed in (("policy", 0), ("teacher", 5)):
        save_checkpoint(folder / name, "qwen2", seed=seed)
    names = ("prompt_ids", "response_ids", "reward", "group")
    rows = [{name: getattr(own, name) for name in names} for own in make_responses(make_policy("qwen2"), **given)]
    batch = read_rollouts(write_rollouts(folder / "rollouts.jsonl", rows))
    best = [own.topk(TOP) for own in logprobs(folder / "teacher", batch)]
    told = ({"teacher_top_ids": own.indices.tolist(), "teacher_top_logprobs": own.values.tolist()} for own in best)
    write_rollouts(folder / "logged.jsonl", [row | own for row, own in zip(rows, told, strict=True)])
    return folder


def logprobs(folder, batch: TokenBatch, policy=None) -> list[Tensor]:
    """log π of the vocabulary at each response token, in float64."""
    policy = policy or in_float64(load_policy(folder))
    with torch.set_grad_enabled(any(p.requires_grad for p in policy.model.parameters())):
        found = []
        for row in range(len(batch)):
            ids, targets = batch.sequence(row)
            found.append(policy.model(input_ids=ids[None], use_cache=False).logits[0, targets - 1].log_softmax(-1))
    return found


def losses(of: str, own: Tensor, other: Tensor) -> Tensor:
    """Each token's, written out."""
    if of == "entropy":
        return -(own.exp() * own).sum(1)
    if of == "reverse-kl":
        return (own.exp() * (own - other)).sum(1)
    best = other.topk(TOP).indices
    pair = (each.gather(1, best) for each in (own, other))
    a, b = (torch.cat([each, (1 - each.exp().sum(1, keepdim=True)).log()], 1) for each in pair)
    return (b.exp() * (b - a)).sum(1)


TAIL = f"forward-kl:top={TOP},rest=tail"
CASES = {
    "entropy": ("rollouts.jsonl", "entropy", False),
    "reverse-kl": ("rollouts.jsonl", "reverse-kl", True),
    "from a teacher": ("rollouts.jsonl", TAIL, True),
    "from the log": ("logged.jsonl", "forward-kl:rest=tail", False),
}


def run(folder, case: str, out, *flags) -> pd.DataFrame:
    file, of, teacher = CASES[case]
    flags = (*flags, "--of", of, *(("--teacher", folder / "teacher") if teacher else ()))
    cli.run("measure", folder / "policy", folder / file, *flags, "--out", out)
    return pd.read_parquet(out / "tokens.parquet")


@pytest.mark.parametrize("case", CASES)
def test_a_tables_norms_and_values_are_those_of_autograd_by_token(case, folder, tmp_path):
    table = run(folder, case, tmp_path / "out")
    policy, batch = in_float64(load_policy(folder / "policy")), read_rollouts(folder / CASES[case][0])
    parameters = [p.requires_grad_(True) for p in policy.model.parameters()]
    own, others = logprobs(None, batch, policy), logprobs(folder / "teacher", batch)
    values = torch.cat([losses(CASES[case][1].split(":")[0], *pair) for pair in zip(own, others, strict=True)])
    gradients = [torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True) for value in values]
    norms = [torch.cat([g.flatten() for g in each if g is not None]).norm().item() for each in gradients]
    np.testing.assert_allclose(table["param_grad_norm"], norms, rtol=FLOAT32)
    np.testing.assert_allclose(table["value"], values.detach(), rtol=FLOAT32)
    assert not table["clamped"].any() and table["act_grad_norm.0"].notna().all()
    assert not {"advantage", "policy_weight", "kl_weight", "weight", "clipped"} & {*table}
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == {"tokens.parquet", "manifest.json"}


def test_a_folder_is_of_its_quantity_and_of_its_teacher(folder, tmp_path, capsys):
    out, teacher = tmp_path / "out", ("--teacher", folder / "teacher")
    table = run(folder, "reverse-kl", out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["of"].startswith("Divergence(beta=1.0") and manifest["teacher"] == str(folder / "teacher")
    pd.testing.assert_frame_equal(run(folder, "reverse-kl", out), table)  # finished
    save_checkpoint(tmp_path / "other", "qwen2", seed=6)
    others = (("--of", "entropy"), ("--of", "jsd", *teacher), ("--of", "reverse-kl", "--teacher", tmp_path / "other"))
    for flags in ((), *others):
        ended = cli.outcome_of(
            capsys, "measure", folder / "policy", folder / "rollouts.jsonl", *flags, "--out", out, "--no-figures"
        )
        assert ended.status == 2 and "another --out" in ended.err
    of = Divergence(1.0, load_policy(folder / "teacher"))
    found = measure(folder / "policy", folder / "rollouts.jsonl", of=of, tokens_per_interval="auto", out=out)
    pd.testing.assert_frame_equal(found, table)  # it is read


def test_a_sample_is_drawn_by_the_quantitys_own_norms_at_the_logits(folder, tmp_path):
    table = run(folder, "entropy", tmp_path / "out", "--tokens-per-interval", "2")
    whole = run(folder, "entropy", tmp_path / "whole")
    some = table["param_grad_norm"].notna()
    assert 0 < some.sum() < len(table) and table["sampling_probability"].between(0, 1).all()
    np.testing.assert_allclose(table["logit_grad_norm"], whole["logit_grad_norm"], rtol=1e-6)
    np.testing.assert_allclose(table["param_grad_norm"][some], whole["param_grad_norm"][some], rtol=FLOAT32)


def test_from_python_a_table_of_another_quantity_is_no_table_of_weights(folder):
    policy, batch = load_policy(folder / "policy"), read_rollouts(folder / "logged.jsonl")
    table = measure(policy, batch, of="jsd:beta=.3")
    assert table["value"].notna().all()
    with pytest.raises(InputError):
        compare(policy, batch, ["cispo"], table=table)
    for wrong in ({"weighting": "sft"}, {"minutes": 1}, {"metric": "adamw"}):
        with pytest.raises(InputError):
            measure(policy, batch, of="entropy", **wrong)
    with pytest.raises(InputError):
        measure(policy, batch, of="forward-kl:top=-1")
    with pytest.raises(InputError):
        measure(policy, replace(batch, teacher_top_ids=None, teacher_top_logprobs=None), of="forward-kl")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--of", "reverse-kI"), "reverse-kl"),
        (("--of", "reverse-kl:beta=.3"), "beta"),
        (("--of", "jsd:top=x"), "whole number"),
        (("--of", "reverse-kl"), "--teacher"),
        (("--of", "entropy", "--theory"), "--theory"),
        (("--of", "entropy", "--weighting", "sft"), "--weighting"),
        (("--of", "entropy", "--minutes", "1"), "--minutes"),
        (("--of", "entropy", "--metric", "adamw"), "--metric"),
        (("--of", "entropy", "--plan"), "--plan"),
    ],
)
def test_what_does_not_apply_is_named_in_one_line(flags, word, folder, tmp_path, capsys):
    out = tmp_path / "out"
    ended = cli.outcome_of(capsys, "measure", folder / "policy", folder / "rollouts.jsonl", *flags, "--out", out)
    assert ended.status == 2 and word in ended.err and "Traceback" not in ended.err and not out.exists()
