"""The policy that comes with the package: it loads, its tokenizer is lossless, it answers in format, some rightly."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import gradscope
from analyses.recipes.case_analysis import write_response
from gradscope.tasks import get_task
from gradscope.tasks.knights_knaves import compact_prompt, draw_statements
from gradscope.tasks.knights_knaves_wording import COMPACT_NAMES

FOLDER = Path(gradscope.__file__).parent / "embedded"
TASK = get_task("knights-knaves-compact")


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def sampled(model, tokenizer):
    """(question, ids of the response, the response's text) of 48 puzzles of 2 to 4 people, sampled at T = 0.7."""
    rows = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for people in (2, 3, 4):
            questions = TASK.questions(16, seed=people, people=(people,))
            encoded = tokenizer([q.prompt for q in questions], return_tensors="pt", padding=True)
            out = model.generate(
                input_ids=encoded.input_ids,
                attention_mask=encoded.attention_mask,
                max_new_tokens=300,
                do_sample=True,
                temperature=0.7,
                top_k=0,
            )[:, encoded.input_ids.shape[1] :]
            for question, ids in zip(questions, out.tolist(), strict=True):
                ids = [i for i in ids if i not in (tokenizer.pad_token_id, tokenizer.eos_token_id)]
                rows.append((question, ids, tokenizer.decode(ids)))
    return rows


def test_it_is_a_small_qwen2_in_float32_with_tied_embeddings(model):
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert sum(p.numel() for p in model.parameters()) == 805_376


@pytest.mark.parametrize("people", range(2, 9))
def test_prompts_and_traces_survive_the_tokenizer(tokenizer, people):
    rng = random.Random(people)
    for _ in range(10):
        statements = draw_statements(people, rng)
        text = compact_prompt(statements) + write_response(statements, COMPACT_NAMES, rng=rng, noise=0.2, check=0.5)
        ids = tokenizer.encode(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(tokenizer.decode(ids)) == ids
        assert len(tokenizer.encode(compact_prompt(statements))) <= 10 * people


def test_what_it_samples_survives_the_tokenizer(tokenizer, sampled):
    same = [tokenizer.encode(text) == ids for _, ids, text in sampled]
    assert sum(same) >= len(same) - 1  # a rare spelled-out phrase would come back as one token


def test_nearly_every_answer_has_the_right_format(sampled):
    earned = [TASK.reward(text, question) for question, _, text in sampled]
    assert sum(reward != -3.0 for reward in earned) >= len(earned) - 1


def test_it_solves_some_puzzles_and_far_from_all(sampled):
    right = sum(TASK.reward(text, question) == 3.0 for question, _, text in sampled) / len(sampled)
    assert 0.15 < right < 0.85  # chance, with two statuses a person, would be .146 on these levels
