"""`--teacher`: log ν of a log's tokens from a checkpoint, in place of the log's."""

from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.cli import assert_one_line, outcome_of
from support.policies import VOCAB, make_model, make_policy, make_responses, make_tokenizer, save_checkpoint

from gradscope.policy import load_policy
from gradscope.rollouts import collate, write_rollouts

T = 0.7
QUICK = ("--no-figures", "--no-self-check", "--weighting", "opd")


@pytest.fixture
def run(capsys):
    return partial(outcome_of, capsys)


def log_nu(teacher: Path, prompt: list[int], response: list[int]) -> torch.Tensor:
    """log ν of a response's tokens, in float64, written out."""
    model, ids = load_policy(teacher, dtype="float64").model, torch.tensor([prompt + response])
    with torch.no_grad():
        logprobs = (model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / T).log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]


def test_a_teachers_log_probabilities_are_taken_and_the_run_knows_it(run, tmp_path):
    policy, teacher = (save_checkpoint(tmp_path / name, name, seed=seed) for seed, name in enumerate(("llama", "gpt2")))
    responses = make_responses(make_policy("llama"), temperature=T, holes=False)
    write_rollouts(tmp_path / "rollouts.jsonl", collate(responses))
    asked = ("measure", policy, tmp_path / "rollouts.jsonl", *QUICK)
    out = tmp_path / "out"
    assert run(*asked, "--out", out, "--teacher", teacher).status == 0
    table = pd.read_parquet(out / "tokens.parquet")
    wanted = torch.cat([log_nu(teacher, r.prompt_ids, r.response_ids) for r in responses])
    found = torch.tensor(table["teacher_logprob"].tolist(), dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    before = (out / "tokens.parquet").stat().st_mtime_ns
    assert "already" in run(*asked, "--out", out, "--teacher", teacher).out
    assert (out / "tokens.parquet").stat().st_mtime_ns == before
    assert run(*asked, "--plan", "--teacher", teacher).status == 0
    other = save_checkpoint(tmp_path / "other", "gpt2", seed=7)
    refused = run(*asked, "--out", out, "--teacher", other)
    assert refused.status == 2 and "teacher" in refused.err


@pytest.mark.parametrize("wrong", ["itself", "vocabulary", "tokenizer", "missing"])
def test_a_teacher_that_cannot_be_one_is_refused_in_one_line(run, wrong, tmp_path):
    policy = save_checkpoint(tmp_path / "policy", "llama")
    write_rollouts(tmp_path / "rollouts.jsonl", collate(make_responses(make_policy("llama"))))
    teacher = policy if wrong == "itself" else tmp_path / "teacher"
    if wrong == "vocabulary":
        model = make_model("gpt2")
        model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
        model.save_pretrained(teacher)
    if wrong == "tokenizer":
        save_checkpoint(teacher, "gpt2")
        words = make_tokenizer()
        words.add_tokens("a-word-that-it-had-not")
        words.save_pretrained(teacher)
    asked = ("measure", policy, tmp_path / "rollouts.jsonl", *QUICK, "--out", tmp_path / "out", "--teacher", teacher)
    outcome = run(*asked)
    assert_one_line(outcome)
    assert not (tmp_path / "out").exists()
