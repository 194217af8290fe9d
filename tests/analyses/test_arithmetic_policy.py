"""The policy of the math runs: its recipe runs, its tokenizer is lossless, and what was written about it is true."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

import analyses.common.sums
from analyses.common.experiments import configure, list_runs
from analyses.common.make_run import judge
from analyses.common.math_tracks import read_before
from analyses.common.sums import STEPS, TEST, draw_terms, is_of_test, write_question, write_steps
from analyses.recipes import arithmetic_policy
from analyses.recipes.arithmetic_policy import SumsStage, build_model, build_tokenizer, examples
from gradscope import load_policy

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / configure("cpu", "math", "grpo").model
MATH = [run for run in list_runs("cpu") if run.track == "math"]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_it_loads_with_the_tokenizer_of_the_recipe(tokenizer):
    policy = load_policy(str(FOLDER))
    assert policy.model.num_parameters() == build_model(tokenizer).num_parameters() == 113_536
    assert policy.dtype == torch.float32
    text = "".join(map(chr, range(32, 127))) + "\n 47+5=52 =52"
    assert policy.decode(policy.encode_response(text)) == text
    assert policy.encode_response(text) == tokenizer.encode(text)


def test_questions_and_longest_responses_fit_the_runs_limits(tokenizer):
    rng = random.Random(0)
    for _ in range(500):
        terms = draw_terms(max(STEPS), rng)
        response = tokenizer.encode(write_steps(terms, rng=rng))
        assert len(response) < MATH[0].config.max_new_tokens
        assert len(tokenizer.encode(write_question(terms))) + MATH[0].config.max_new_tokens <= 128


def test_it_never_learns_from_a_question_of_the_test(tokenizer):
    stage = SumsStage("any", steps=1, batch=1, lr=(1e-3, 1e-3), noise=0.03, bare=0.06)
    stream, bare = examples(tokenizer, stage, random.Random(3)), 0
    for _ in range(2000):
        ids, length = next(stream)
        assert ids[-1] == tokenizer.eos_token_id
        assert not is_of_test(tokenizer.decode(ids[:length]))
        assert TEST.grade(tokenizer.decode(ids[length:-1]), TEST.questions(1, seed=0)[0]).format_ok
        bare += tokenizer.decode(ids[length : length + 1]) == "="
    assert bare / 2000 == pytest.approx(0.06 * sum(STEPS) / len(STEPS), abs=0.04)  # four standard errors


def test_the_log_says_what_the_kept_table_says():
    text = (REPOSITORY / "analyses/recipes/logs/arithmetic_policy.jsonl").read_text()
    log = [json.loads(line) for line in text.splitlines()]
    logged = pd.DataFrame([line for line in log if "level" in line]).set_index("level")
    table = read_before("cpu", "math").set_index("level")
    for name in ("greedy_accuracy", "avg@16", "pass@16"):
        assert logged[name].to_numpy() == pytest.approx(table[name].to_numpy(), abs=1e-4)
    assert 0.4 < table.loc["all", "avg@16"] < 0.6  # so that training can gain and lose


def test_it_answers_as_the_kept_table_says():
    test = replace(MATH[0].test, questions=100, samples=0)
    found = judge(FOLDER, test).table.set_index("level")
    kept = read_before("cpu", "math").set_index("level")
    # Half of the kept table's questions: .785 and four standard errors of the other half's mean.
    assert found.loc["all", "greedy_accuracy"] == pytest.approx(kept.loc["all", "greedy_accuracy"], abs=0.12)


def test_the_recipe_runs_and_its_seed_fixes_the_weights(tmp_path, monkeypatch):
    stages = tuple(replace(stage, steps=2, batch=2) for stage in arithmetic_policy.STAGES)
    monkeypatch.setattr(arithmetic_policy, "STAGES", stages)
    quick = [replace(run, test=replace(run.test, questions=5, samples=16, max_new_tokens=4)) for run in MATH[:1]]
    monkeypatch.setattr(arithmetic_policy, "list_runs", lambda scale: quick)
    for name in ("one", "two"):
        arithmetic_policy.main(arithmetic_policy.Options(out=tmp_path / name, log=tmp_path / f"{name}.jsonl"))
    one, two = ((tmp_path / name / "arithmetic-policy" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    assert (tmp_path / "one" / "math" / "untrained.csv").read_bytes() == (
        tmp_path / "two" / "math" / "untrained.csv"
    ).read_bytes()


def test_the_math_runs_have_the_papers_settings_for_math():
    assert {run.variant for run in MATH} == {"grpo", "reweight", "lopti", "both"}
    for run in MATH:
        assert run.config.temperature == run.test.temperature == 1.0
        assert run.config.num_responses == 2 * run.config.mini_batch_size
        assert run.config.reweight_alpha == (0.1 if run.variant in ("reweight", "both") else None)
        assert run.config.lopti_eta == (0.5 if run.variant in ("lopti", "both") else None)
        assert run.config.kl_coef == 0.001
        assert run.config.task == analyses.common.sums.TRAIN.name != run.test.task
