"""The scales gpu and paper: which runs they have, with the paper's settings, and tests of several benchmarks."""

from collections import Counter
from dataclasses import replace

import pytest
from support.tiers import every

import analyses.common.puzzles  # noqa: F401  (registers its tasks)
from analyses.common import experiments
from analyses.common.experiments import configure, list_runs, tracks_of
from gradscope.tasks import draw_questions, get_task
from gradscope.trainer import get_preset

PUZZLES, MATH = ("puzzles-3b", "puzzles-7b"), ("math-dsr", "math-orz")
PAPER = {"puzzles-3b": "kk-qwen2.5-3b", "puzzles-7b": "kk-qwen2.5-7b"}
PAPER |= {"math-dsr": "math-qwen2.5-7b", "math-orz": "orz-qwen2.5-7b"}


def test_the_papers_tracks_are_its_presets_and_plain_grpo_changes_nothing():
    assert list(read_tracks("paper")) == [*PUZZLES, *MATH]
    for track, preset in PAPER.items():
        assert configure("paper", track, "grpo") == get_preset(preset)


@pytest.mark.parametrize("track", PAPER)
def test_alpha_and_eta_are_those_of_the_papers_table_3_and_appendix_d(track):
    alpha = 0.3 if track in PUZZLES else 0.1
    settings = {variant: configure("paper", track, variant) for variant in ("reweight", "lopti", "both")}
    assert (settings["reweight"].reweight_alpha, settings["reweight"].lopti_eta) == (alpha, None)
    assert (settings["lopti"].reweight_alpha, settings["lopti"].lopti_eta) == (None, 0.5)
    assert (settings["both"].reweight_alpha, settings["both"].lopti_eta) == (alpha, 0.5)
    assert configure("paper", track, "matched-norm").reweight_alpha == alpha
    if track in PUZZLES:
        assert configure("paper", track, "rpp-reweight").reweight_alpha == 0.1


@pytest.mark.parametrize(("scale", "track"), every(3, [("gpu", "puzzles"), *(("paper", track) for track in PAPER)]))
def test_no_run_is_listed_twice_and_every_variant_has_seed_0(scale, track):
    runs = [run for run in list_runs(scale) if run.track == track]
    assert max(Counter(run.place for run in runs).values()) == 1
    assert {run.variant for run in runs if run.seed == 0} == {run.variant for run in runs}
    assert all(run.config.seed == run.seed for run in runs)
    steps = {run.config.mini_batch_size for run in runs if run.variant == "twice-the-steps"}
    assert steps == {configure(scale, track, "grpo").mini_batch_size // 2}


@pytest.mark.parametrize("scale", every(2, ["cpu", "certain"]))
def test_rates_are_varied_alone_and_judged_on_puzzles_that_neither_training_nor_the_test_has(scale):
    low, middle, high = (configure(scale, f"rate-{name}", "grpo") for name in ("low", "middle", "high"))
    assert low.learning_rate < middle.learning_rate < high.learning_rate
    assert low == replace(middle, learning_rate=5e-5) == replace(high, learning_rate=5e-5)
    tests = {run.track: run.test for run in list_runs(scale)}
    assert tests["rate-high"] == tests["rate-low"] and tests["rate-low"].task == "kk-compact-validation"
    tasks = [get_task(name) for name in (low.task, "kk-compact-validation", "kk-compact-test")]
    drawn = [{question.prompt for question in task.questions(60, seed=0, people=(2, 3))} for task in tasks]
    assert len(set.union(*drawn)) == 180


def test_every_figure_of_the_papers_puzzles_has_its_variants_in_the_scales_gpu_and_paper():
    wanted = {name: tracks.get("puzzles", []) for name, tracks in experiments.read()["figures"].items()}
    del wanted["decision"], wanted["rare_tokens"]  # none of the paper's: they are of the embedded policy
    only_3b = ("fig6",)  # the paper's ablations are of one model
    for scale in ("gpu", "paper"):
        for track in tracks_of("puzzles", scale):
            made = {run.variant for run in list_runs(scale) if run.track == track}
            for name, variants in wanted.items():
                assert set(variants) <= made or (name in only_3b and track == "puzzles-7b"), (name, track)


def test_math_is_judged_as_in_table_1():
    for track in MATH:
        parts = next(run for run in list_runs("paper") if run.track == track).test.parts()
        samples = {name: part.samples for name, part in parts.items()}
        assert samples == {"olympiad_bench": 0, "minerva": 0, "math500": 0, "amc": 16, "aime24": 16}
        assert {part.checkpoints for part in parts.values()} == {3}
        assert {(part.temperature, part.max_new_tokens, part.questions) for part in parts.values()} == {
            (1.0, 4096, None)
        }


@pytest.mark.all
def test_the_papers_tests_read_every_row_of_the_data(data_folder):
    rows = {"puzzles": {"all": 500}}
    rows["math"] = {"olympiad_bench": 675, "minerva": 272, "math500": 500, "amc": 83, "aime24": 30}
    for kind, sizes in rows.items():
        for track in tracks_of(kind, "paper"):
            parts = next(run for run in list_runs("paper") if run.track == track).test.parts()
            drawn = {
                name or "all": draw_questions(get_task(p.task), p.questions, seed=0, people=p.people, files=p.data)
                for name, p in parts.items()
            }
            assert {name: len(questions) for name, questions in drawn.items()} == sizes
            if kind == "puzzles":
                assert Counter(question.level for question in drawn["all"]) == dict.fromkeys((3, 4, 5, 6, 7), 100)


def read_tracks(scale):
    return experiments.read()["scales"][scale]["tracks"]
