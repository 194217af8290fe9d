"""Scale gpu in small: the recipe of its policy, interrupted and taken up again, and a run of its track on that."""

from dataclasses import replace

import pandas as pd
import pytest

from analyses.common import make_run
from analyses.common.experiments import list_runs
from analyses.common.puzzles import NAMED_TEST, NAMED_TRAIN, is_for_test
from analyses.recipes import gpu_policy
from analyses.recipes.gpu_policy import Options, main
from analyses.recipes.supervised import build_tokenizer
from gradscope import load_policy
from gradscope.tasks.knights_knaves import NAMES
from gradscope.tasks.knights_knaves_wording import parse_claim

TINY = {"tokens": 2_000, "hidden": 32, "layers": 2, "batch": 4, "longest": 100, "questions": 5, "target": 1.0}
TINY |= {"workers": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A policy of 30,000 parameters, made in several commands, and how often a command was needed."""
    out, commands = tmp_path_factory.mktemp("gpu") / "policy", 0
    while not out.exists():
        main(Options(out=out, minutes=0.0 if commands < 2 else 9.0, **TINY))
        commands += 1
        assert commands < 5
    return out, commands


def test_the_policy_is_small_loads_and_knows_the_names_as_single_tokens(made):
    policy = load_policy(made[0])
    assert sum(p.numel() for p in policy.model.parameters()) < 40_000
    assert sum(file.stat().st_size for file in made[0].iterdir()) < 100_000
    [question] = NAMED_TEST.questions(1, seed=0, people=(7,))
    ids = policy.encode_prompt(question.prompt)
    assert policy.decode(ids) == question.prompt
    assert all(len(policy.encode_response(name)) == 1 for name in NAMES)


def test_no_puzzle_of_the_test_is_learned_from_whatever_the_names():
    tokenizer = build_tokenizer(NAMES)
    stage = gpu_policy.list_stages(Options(**TINY), tokenizer)[0]
    rows = gpu_policy.Examples(tokenizer, stage, 200, "0 x").rows(gpu_policy.random.Random(0))
    seen = [tokenizer.decode(ids[:prompt]) for ids, prompt in (next(rows) for _ in range(30))]
    assert not any(is_for_test(statements_of(text)) for text in seen)
    assert all(is_for_test(statements_of(q.prompt)) for q in NAMED_TEST.questions(10, seed=0, people=(3, 4)))
    assert not any(is_for_test(statements_of(q.prompt)) for q in NAMED_TRAIN.questions(10, seed=0, people=(3, 4)))
    assert len({statement.partition(":")[0] for text in seen for statement in text.splitlines()[:-1]}) > 20


def test_a_run_of_the_track_goes_through_on_it(made, tmp_path, monkeypatch):
    monkeypatch.setattr(make_run, "RUNS", tmp_path / "kept")
    monkeypatch.setattr(make_run, "WORK", tmp_path / "work")
    run = next(run for run in list_runs("gpu") if run.variant == "lopti")
    few = {"steps": 2, "questions_per_step": 2, "group_size": 8, "mini_batch_size": 8, "micro_batch_size": 8}
    few |= {"max_new_tokens": 64, "save_every": 1, "people": (3, 4), "device": "cpu"}
    run = replace(run, config=replace(run.config, model=str(made[0]), **few))
    run = replace(run, test=replace(run.test, questions=2, samples=2, max_new_tokens=16, people=(3, 4)))
    make_run.make(run)
    kept = tmp_path / "kept" / run.place
    test = pd.read_csv(kept / "test.csv")
    assert test["level"].tolist() == ["3", "4", "all"] * 2
    assert len(pd.read_csv(kept / "metrics.csv")) == 2


def statements_of(prompt):
    lines = [line.split(": ") for line in prompt.removesuffix("<think>").splitlines()]
    names = [name for name, _ in lines]
    return tuple(parse_claim(claim.removesuffix("."), names) for _, claim in lines)
