"""The policies that come along: they load, lose no text, answer in format, some rightly, as surely as is said."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from analyses.recipes.case_analysis import write_response
from analyses.recipes.hasty_analysis import PHRASES, write_hastily
from gradscope.intervals import assign_intervals
from gradscope.policy import EMBEDDED
from gradscope.tasks import get_task
from gradscope.tasks.knights_knaves import compact_prompt, draw_statements
from gradscope.tasks.knights_knaves_wording import COMPACT_NAMES

PAPER_SHARES = (0.1922, 0.1015, 0.1009, 0.6054)
TASK = get_task("knights-knaves-compact")


@pytest.fixture(scope="module", params=list(EMBEDDED))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return PreTrainedTokenizerFast.from_pretrained(EMBEDDED[name])


@pytest.fixture(scope="module")
def model(name):
    return AutoModelForCausalLM.from_pretrained(EMBEDDED[name]).eval()


@pytest.fixture(scope="module")
def sampled(model, tokenizer):
    """(question, ids of the response, its text, their probabilities): 48 puzzles of 2 to 4 people, at T = 0.7."""
    rows = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for people in (2, 3, 4):
            questions = TASK.questions(16, seed=people, people=(people,))
            encoded = tokenizer([q.prompt for q in questions], return_tensors="pt", padding=True)
            made = model.generate(
                input_ids=encoded.input_ids,
                attention_mask=encoded.attention_mask,
                max_new_tokens=300,
                do_sample=True,
                temperature=0.7,
                top_k=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
            new = made.sequences[:, encoded.input_ids.shape[1] :]
            probs = torch.stack(made.scores, 1).softmax(-1).gather(2, new[..., None])[..., 0]
            for question, ids, prob in zip(questions, new, probs, strict=True):
                kept = (ids != tokenizer.pad_token_id) & (ids != tokenizer.eos_token_id)
                rows.append((question, ids[kept].tolist(), tokenizer.decode(ids[kept]), prob[kept].clamp(max=1.0)))
    return rows


def test_it_is_small_in_float32_with_tied_embeddings(name, model):
    kind, size = {"embedded": ("Llama", 810_624), "embedded-certain": ("Qwen2", 805_376)}[name]
    assert model.config.architectures == [f"{kind}ForCausalLM"]
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert sum(p.numel() for p in model.parameters()) == size


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
    same = [tokenizer.encode(text) == ids for _, ids, text, _ in sampled]
    assert sum(same) >= len(same) - 1  # a rare spelled-out phrase would come back as one token


def test_nearly_every_answer_has_the_right_format(sampled):
    earned = [TASK.reward(text, question) for question, _, text, _ in sampled]
    assert sum(reward != -3.0 for reward in earned) >= len(earned) - 1


def test_it_solves_some_puzzles_and_far_from_all(sampled):
    right = sum(TASK.reward(text, question) == 3.0 for question, _, text, _ in sampled) / len(sampled)
    assert 0.15 < right < 0.85  # chance, with two statuses a person, would be .146 on these levels


def test_its_tokens_are_as_uncertain_as_is_said(name, sampled):
    probs = torch.cat([prob for *_, prob in sampled]).double().numpy()
    shares = [(assign_intervals(probs) == interval).mean() for interval in range(4)]
    if name == "embedded":
        assert shares == pytest.approx(PAPER_SHARES, abs=0.035)  # 48 responses; of 800 within .01
    else:
        assert shares[0] < 0.04 and shares[3] > 0.85


def test_autotokenizer_gives_the_embedded_policys_ids_on_a_thousand_texts():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED["embedded"])
    loaded, rng = AutoTokenizer.from_pretrained(EMBEDDED["embedded"]), random.Random(0)
    assert all(len(loaded.encode(phrase)) == 1 for phrase in PHRASES)
    for _ in range(1000):
        statements = draw_statements(rng.choice((2, 3, 4, 5)), rng)
        text = compact_prompt(statements) + write_hastily(statements, COMPACT_NAMES, rng=rng)
        ids = loaded.encode(text)
        assert ids == tokenizer.encode(text) and loaded.decode(ids) == text
    chat = [{"role": "user", "content": compact_prompt(statements).removesuffix("<think>")}]
    told = loaded.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert told == compact_prompt(statements)
