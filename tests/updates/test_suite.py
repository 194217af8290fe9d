"""The suite of steps for a trainer: what is written, and that its audit names what a trainer does with each."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from support.cli import assert_one_line, outcome_of, run
from support.policies import save_checkpoint
from support.refusals import refused
from transformers import AutoModelForCausalLM

from gradscope.updates import SUITE, audit_suite, write_suite


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    return write_suite(str(save_checkpoint(folder / "checkpoint", "qwen2")), folder / "suite")


@pytest.fixture
def suite(written, tmp_path):
    """Without gradients."""
    return shutil.copytree(written, tmp_path / "suite")


def own_step(
    suite, name, *, average="sequence-mean", ignore_tools=False, sign=1.0, cold=True, minimum=True, corrected=False,
    clips=(0.8, 1.2), times=lambda key: 1.0,
):  # fmt: skip
    """A trainer's step by plain autograd, by default with means over responses, all of the same weight."""
    case = json.loads((suite / "manifest.json").read_text())["cases"][name]
    model, rows = (
        AutoModelForCausalLM.from_pretrained(suite / "model"),
        pd.read_parquet(suite / name / "rollouts.parquet"),
    )
    if "adapter" in case:
        model = PeftModel.from_pretrained(model, suite / case["adapter"], is_trainable=True)
    masks = [row.get("response_mask", [True] * len(row["response_ids"])) for row in rows.to_dict("records")]
    count, micro_batch = torch.tensor([sum(own) for own in masks]), torch.tensor(rows["micro_batch"])
    shares = {"sequence-mean": 1 / count / len(rows), "token-mean": torch.ones(len(rows)) / count.sum()}
    parts = torch.bincount(micro_batch, count.double())
    shares |= {"micro-batches": 1 / parts[micro_batch] / len(parts), "sum": torch.ones(len(rows))}
    total = 0.0
    for row, share in zip(rows.to_dict("records"), shares[average], strict=True):
        prompt, answer = torch.tensor(row["prompt_ids"]), torch.tensor(row["response_ids"])
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / (case["temperature"] if cold else 1.0)).log_softmax(-1)[range(len(answer)), answer]
        old = torch.tensor(row["old_logprobs"]) if "old_logprobs" in row else logprobs.detach()
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(*clips) * row["advantage"]
        terms = torch.minimum(ratio * row["advantage"], clipped) if minimum else clipped
        if "ref_logprobs" in row:
            gap = torch.tensor(row["ref_logprobs"]) - logprobs
            pull = (gap.exp() - gap - 1) * (ratio if corrected else 1.0)
            terms = terms - sign * case["loss"]["kl_coef"] * pull
        kept = torch.tensor(row.get("response_mask", [True] * len(answer)))
        total -= (terms.mean() * kept.sum() if ignore_tools else terms[kept].sum()) * share
    total.backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    save_file({key: times(key) * own for key, own in found.items()}, suite / name / "gradient.safetensors")


def test_a_trainers_average_is_named_in_every_case(suite):
    for name in SUITE:
        own_step(suite, name)
    found = audit_suite(suite)
    assert (found.cases["kind"] == "right").all() and found.averages == ("sequence-mean",) and not found.wrong
    assert all("sequence-mean" in names for names in found.cases["average"])


def kinds(found):
    """Kind by case, of those with a gradient."""
    cases = found.cases.set_index("case")
    return cases["kind"][cases["kind"] != "missing"].to_dict()


def test_a_mean_over_micro_batches_is_wrong_where_another_is_expected(suite):
    for name in ("lengths", "tools"):
        own_step(suite, name, average="micro-batches")
    found = audit_suite(suite)
    assert {*kinds(found).values()} == {"right"} and found.averages == ("micro-batches",)
    assert kinds(audit_suite(suite, expect="micro-batches")) == kinds(found)
    assert kinds(audit_suite(suite, expect="token-mean")) == {"lengths": "right", "tools": "average"}
    own_step(suite, "micro-batches", average="token-mean")
    found = audit_suite(suite)
    assert found.averages == () and {*found.cases["kind"]} == {"right", "missing"}


def test_named_faults_are_wrong(suite):
    own_step(suite, "temperature", cold=False)
    own_step(suite, "clips", minimum=False)
    own_step(suite, "kl", corrected=True)
    own_step(suite, "lora", corrected=True)
    found = audit_suite(suite)
    assert kinds(found) == dict.fromkeys(("clips", "kl", "temperature", "lora"), "fault")
    faults = {name: (own.fault, own.also) for name, own in found.audits.items()}
    assert faults["temperature"][0] == "no-temperature" and faults["clips"][0] == "clip-alone"
    assert faults["kl"] == faults["lora"] == ("kl-correction", ())
    assert all(found.cases.set_index("case").loc[[*faults], "to_do"].map(len))


@pytest.mark.parametrize("clips", [(0.8, 1.24), (0.8, 1.28), (0.76, 1.2), (0.72, 1.2)])
def test_a_clip_that_is_another_by_some_hundredths_is_wrong(suite, clips):
    for name in ("clips", "all"):
        own_step(suite, name, clips=clips)
    cases = audit_suite(suite).cases.set_index("case")
    assert not cases.loc[["clips", "all"], "found"].str.startswith("right").any()


def test_one_factor_is_told_once(suite):
    for name in ("lengths", "tools"):
        own_step(suite, name, average="sum")
    found = audit_suite(suite)
    assert {*kinds(found).values()} == {"factor"} and {*found.cases["cause"].dropna()} == {"sum"}
    assert sum("lengths" in line for line in found.wrong[:-1]) == sum("tools" in line for line in found.wrong[:-1]) == 1


def test_a_case_that_cannot_be_audited_leaves_the_others(suite, tmp_path, capsys):
    own_step(suite, "lengths", average="token-mean")
    own_step(suite, "clips", times=lambda key: float("nan"))
    save_file({"lm_head.weight": torch.ones(3)}, suite / "kl" / "gradient.safetensors")
    outcome = outcome_of(capsys, "audit", "embedded", "--suite", suite, "--out", tmp_path / "out")
    assert outcome.status == 2 and "clips, kl" in outcome.err
    assert all(str(suite / name / "gradient.safetensors") in outcome.out for name in ("clips", "kl"))
    assert (tmp_path / "out/lengths/verdict.txt").is_file()
    told = pd.read_csv(tmp_path / "out/suite.csv").set_index("case")["kind"]
    assert told[told != "missing"].to_dict() == {"lengths": "right", "clips": "invalid", "kl": "invalid"}


def test_kl_of_the_suite_is_as_it_was_written(suite, tmp_path, capsys):
    source = str(suite / "model")
    folder = write_suite(source, tmp_path / "corrected", kl_corrected=True)
    assert (folder / "model/tokenizer.json").is_file()
    own_step(folder, "kl", corrected=True)
    assert kinds(audit_suite(folder)) == {"kl": "right"}
    assert outcome_of(capsys, "audit", source, "--suite", folder, "--kl-corrected").status == 0
    assert_one_line(outcome_of(capsys, "audit", source, "--suite", suite, "--kl-corrected"), "--kl-corrected")


def test_faults_are_named_where_a_case_shows_them_and_others_are_missing(suite):
    own_step(suite, "tools", ignore_tools=True)
    own_step(suite, "kl", sign=-1.0)
    own_step(suite, "lora", times=lambda key: 2.0 if "layers.1." in key and "lora_B" in key else 1.0)
    audited = audit_suite(suite)
    found = audited.cases.set_index("case")
    assert audited.audits["tools"].reading == "mask-ignored (sequence-mean)"
    assert audited.audits["kl"].reading == "kl-sign (sequence-mean)"
    assert found.loc["lora", "kind"] == "parameters" and "layers.1" in found.loc["lora", "verdict"]
    assert set(found.index[found["kind"] == "missing"]) == SUITE.keys() - {"tools", "kl", "lora"}


def test_each_case_has_what_it_tries(written):
    suite, rows = written, {name: pd.read_parquet(written / name / "rollouts.parquet") for name in SUITE}
    assert all(frame["response_ids"].map(len).nunique() > 4 for frame in rows.values())
    halves = rows["micro-batches"].groupby("micro_batch")["response_ids"].apply(lambda ids: ids.map(len).sum())
    assert len(halves) == 2 and halves.nunique() == 2
    assert any(not all(mask) for mask in rows["tools"]["response_mask"])
    assert (rows["equal-rewards"].groupby("group")["reward"].nunique() == 1).sum() == 1
    model, both = AutoModelForCausalLM.from_pretrained(suite / "model"), [False, False]
    for row in rows["clips"].to_dict("records"):
        ids = torch.tensor([*row["prompt_ids"], *row["response_ids"]])
        logits = model(input_ids=ids[None]).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
        own = logits[range(len(row["response_ids"])), ids[len(row["prompt_ids"]) :]]
        ratio = (own - torch.tensor(row["old_logprobs"])).exp()
        both[0] |= bool((ratio > 1.2).any()) and row["advantage"] > 0
        both[1] |= bool((ratio < 0.8).any()) and row["advantage"] < 0
    assert all(both)
    adapted, gaps = PeftModel.from_pretrained(model, suite / "adapter"), []
    for row in rows["lora"].to_dict("records"):
        ids = torch.tensor([*row["prompt_ids"], *row["response_ids"]])
        with torch.no_grad(), adapted.disable_adapter():
            logits = adapted(input_ids=ids[None]).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
        own = logits[range(len(row["response_ids"])), ids[len(row["prompt_ids"]) :]]
        gaps.append((own - torch.tensor(row["ref_logprobs"])).abs().max())
    assert max(gaps) < 1e-4 and all(p.any() for name, p in adapted.named_parameters() if "lora" in name)


def test_without_peft_there_is_no_case_of_a_lora(tmp_path, monkeypatch):
    monkeypatch.setattr("gradscope.updates.auditing.suite.find_spec", lambda name: None)
    folder = write_suite(str(save_checkpoint(tmp_path / "checkpoint", "qwen2")), tmp_path / "suite")
    own_step(folder, "lengths")
    assert set(audit_suite(folder).cases["case"]) == SUITE.keys() - {"lora"} and not (folder / "adapter").exists()


def test_a_large_model_is_shrunk_within_its_architecture(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    large = Qwen3Config(hidden_size=256, num_hidden_layers=6, intermediate_size=512, vocab_size=9000, head_dim=32)
    Qwen3ForCausalLM(large).save_pretrained(tmp_path / "large")
    folder = write_suite(str(tmp_path / "large"), tmp_path / "suite")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert isinstance(model, Qwen3ForCausalLM) and model.num_parameters() < 200_000
    own_step(folder, "all")
    assert audit_suite(folder).audits["all"].reading == "sequence-mean"


def test_the_command_writes_then_asks_for_gradients_then_audits(tmp_path, capsys):
    checkpoint, folder = str(save_checkpoint(tmp_path / "checkpoint", "qwen2")), tmp_path / "suite"
    run("audit", checkpoint, "--suite", folder)
    capsys.readouterr()
    assert_one_line(outcome_of(capsys, "audit", checkpoint, "--suite", folder), "gradient.safetensors")
    own_step(folder, "lengths")
    assert "sequence-mean" in outcome_of(capsys, "audit", checkpoint, "--suite", folder, "--out", tmp_path / "out").out
    assert (pd.read_csv(tmp_path / "out/suite.csv")["kind"] == "missing").sum() == len(SUITE) - 1
    assert_one_line(outcome_of(capsys, "audit", checkpoint), "--suite")


def test_a_folder_without_a_suite_is_refused(tmp_path):
    with refused("manifest.json"):
        audit_suite(tmp_path)
