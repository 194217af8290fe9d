"""TRL's completions, as its own GRPOTrainer writes them: read back as what it sampled, up to what text loses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.dumps import run_trl
from support.policies import BOS, EOS, PAD, make_policy, make_tokenizer, save_checkpoint, write_jsonl
from support.refusals import refused
from tokenizers.processors import TemplateProcessing

from gradscope import load_policy
from gradscope.policy import Policy
from gradscope.rollouts import read_dump

SPECIAL = {PAD, BOS, EOS}


@pytest.mark.filterwarnings("ignore")  # TRL's and transformers' own
@pytest.mark.parametrize("conversational", [False, True], ids=["text", "chat"])
def test_what_trl_wrote_is_what_it_sampled_without_special_tokens(tmp_path, conversational):
    pytest.importorskip("trl")
    model = save_checkpoint(tmp_path / "model", "llama", chat=True)
    sampled = run_trl(model, tmp_path / "out", conversational=conversational)
    dump = read_dump(tmp_path / "out" / "completions", load_policy(model))
    assert dump.format == "trl"
    known = [
        (entry["step"], prompt, [i for i in completion if i not in SPECIAL], advantage)
        for entry in sampled
        for prompt, completion, advantage in zip(
            entry["prompt_ids"], entry["completion_ids"], entry["advantages"], strict=True
        )
    ]
    known = [row for row in known if row[2]]
    assert len(known) > 4
    for row, (step, prompt, completion, advantage) in enumerate(known):
        ids, targets = dump.batch.sequence(row)
        assert ids.tolist() == prompt + completion
        assert dump.batch.advantages[row, targets[0] if len(targets) else 0] == pytest.approx(advantage)
        assert int(dump.steps[row]) == step
    assert len(dump.batch) == len(known)
    assert sum("left out" in note for note in dump.notes) == (len(known) < sum(len(e["advantages"]) for e in sampled))


def trl_policy(template: str) -> Policy:
    """A policy whose template opens an answer with a word that stays when special tokens are skipped."""
    tokenizer = make_tokenizer(others=["user", "assistant", "<think>", "</think>"])
    tokenizer.chat_template = template
    return replace(make_policy("llama"), tokenizer=tokenizer)


NAMED = (
    "{% for m in messages %}{{ '<bos> ' + m['role'] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos> assistant' }}{% endif %}"
)


def told_of(tmp_path, policy, prompt, **columns):
    row = {"step": 1, "prompt": prompt, "completion": "w7", "advantage": 0.5} | columns
    dump = read_dump(write_jsonl(tmp_path / "log.jsonl", [row]), policy, format="trl")
    return dump, [note for note in dump.notes if note.startswith("1 of 1 responses")]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("user w4 w5 assistant", "is a chat without its special tokens"),
        ("user w4 w5 assistant <think> </think>", "is a chat without its special tokens"),
        ("user w4 w5 assistant <think>", "is a chat without its special tokens"),
        ("w4 w5", None),
        ("<bos> user w4 w5 <eos> <bos> assistant", None),
        ([{"role": "user", "content": "w4 w5"}], None),
    ],
)
def test_a_prompt_that_lost_its_templates_marks_is_told_from_plain_text(tmp_path, prompt, words):
    _, told = told_of(tmp_path, trl_policy(NAMED), prompt)
    assert len(told) == (words is not None) and all(words in note for note in told)


def test_where_the_template_leaves_nothing_a_string_may_have_been_a_chat(tmp_path):
    policy = make_policy("llama", tokenizer=True)
    assert not told_of(tmp_path, policy, "w4 w5")[1]  # without a template nothing was a chat
    policy.tokenizer.chat_template = make_tokenizer(chat=True).chat_template
    assert ["if it was a chat" in note for note in told_of(tmp_path, policy, "w4 w5")[1]] == [True]


def test_a_prompt_that_trl_begins_twice_is_begun_once_and_told(tmp_path):
    policy = make_policy("llama", tokenizer=True)
    begin = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    policy.tokenizer._tokenizer.post_processor = begin
    for prompt, many in (("<bos> w4 w5", 1), ("w4 w5", 0)):
        dump, told = told_of(tmp_path, policy, prompt)
        assert dump.batch.sequence(0)[0].tolist() == [BOS, 4, 5, 7]
        assert ["twice" in note for note in told] == [True] * many


def test_a_template_argument_of_trls_own_column_is_used(tmp_path):
    policy = trl_policy(NAMED.replace("assistant'", "assistant ' + ('<think>' if think else '</think>')"))
    chat = [{"role": "user", "content": "w4"}]
    for think, word in ((True, "<think>"), (False, "</think>")):
        dump, _ = told_of(tmp_path, policy, chat, chat_template_kwargs={"think": think})
        assert policy.tokenizer.decode(dump.batch.sequence(0)[0]).split()[-2] == word
    with refused("chat_template_kwargs"):
        told_of(tmp_path, policy, chat, chat_template_kwargs="neither")


@pytest.mark.parametrize("content", ["", "[]", '{"log_history": 7}', '{"log_history": [{"step": 1}]}'])
def test_a_state_that_tells_no_evaluation_leaves_nothing_out(tmp_path, content):
    policy = make_policy("llama", tokenizer=True)
    row = {"step": 1, "prompt": "w4", "completion": "w7", "advantage": 0.5}
    log = write_jsonl(tmp_path / "completions" / "log.jsonl", [row])
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text(content)
    assert len(read_dump(log, policy, format="trl").batch) == 1


def test_what_stands_at_step_0_is_an_evaluation(tmp_path):
    rows = [{"step": s, "prompt": "w4", "completion": f"w{7 + s}", "advantage": 0.5} for s in (0, 1)]
    dump = read_dump(write_jsonl(tmp_path / "log.jsonl", rows), make_policy("llama", tokenizer=True), format="trl")
    assert dump.steps.tolist() == [1]
