"""The policy of the math runs: its recipe runs, its tokenizer is lossless, and what was written about it is true."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analyses.common.experiments import configure, list_runs
from analyses.common.make_run import judge
from analyses.common.math_tracks import read_before
from analyses.common.sums import STEPS, TEST, is_of_test
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
