"""Presets: the paper's numbers, models with the published sizes, data that are there, and runs as long as told."""

import pytest
from support.refusals import refused

from gradscope.objective import PAPER
from gradscope.tasks import draw_questions, get_task
from gradscope.trainer import PRESETS, get_preset

PUZZLES, MATH = ("kk-qwen2.5-3b", "kk-qwen2.5-7b"), ("math-qwen2.5-7b", "orz-qwen2.5-7b")


@pytest.mark.parametrize("name", PUZZLES + MATH)
def test_what_both_columns_of_the_papers_tables_share_is_as_there(name):
    preset = get_preset(name)
    assert preset.loss == PAPER
    assert (preset.algorithm, preset.reweight_alpha, preset.lopti_eta) == ("grpo", None, None)
    assert (preset.group_size, preset.max_new_tokens, preset.learning_rate) == (8, 4096, 1e-6)
    assert (preset.clip_ratio_low, preset.clip_ratio_high, preset.kl_coef) == (0.2, 0.24, 0.001)
    assert (preset.max_grad_norm, preset.warmup_steps, preset.save_every, preset.steps) == (1.0, 0, 20, None)
    assert (preset.engine, preset.precision, preset.gradient_checkpointing) == ("vllm", "bfloat16", True)


@pytest.mark.parametrize("name", PUZZLES + MATH)
def test_what_differs_between_puzzles_and_math_is_as_in_the_papers_tables(name):
    preset = get_preset(name)
    own = (preset.temperature, preset.questions_per_step, preset.mini_batch_size, preset.task)
    assert own == ((0.7, 64, 256, "knights-knaves") if name in PUZZLES else (1.0, 128, 512, "math-plain"))
    assert preset.epochs == (1 if name == "orz-qwen2.5-7b" else 5)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_two_optimizer_steps_of_a_batch(name):
    preset = PRESETS[name]
    assert preset.num_responses == 2 * preset.mini_batch_size
    assert get_task(preset.task).name == preset.task


def test_the_embedded_presets_share_the_papers_loss_and_a_laptops_sizes():
    preset = get_preset("kk-embedded")
    assert (preset.model, preset.people, preset.questions_per_step, preset.group_size) == ("embedded", (2, 3, 4), 16, 8)
    assert (preset.mini_batch_size, preset.learning_rate, preset.temperature) == (64, 2e-4, 0.7)
    assert (preset.weight_decay, preset.max_new_tokens, preset.steps, preset.save_every) == (0.01, 400, 60, 20)
    assert preset.loss == PAPER == get_preset("arithmetic-embedded").loss
    assert len(draw_questions(get_task(preset.task), 16, seed=0, people=preset.people, files=preset.data)) == 16


def test_an_unknown_preset_is_refused_with_the_names_of_all():
    with refused("kk-embedded"):
        get_preset("kk")
