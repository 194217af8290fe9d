"""Text that is tokenized again: dates, chats as strings, nulls, special words, characters that are cut, thoughts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec

import pytest
from support.policies import BOS, make_policy, make_tokenizer, save_checkpoint, write_jsonl
from support.refusals import refused

from gradscope.policy import Policy, load_policy
from gradscope.rollouts import read_dump, read_rollouts

CHAT = [{"role": "user", "content": "w4 w5"}]


def policy_of(template: str | None = None, others: tuple[str, ...] = ()) -> Policy:
    tokenizer = make_tokenizer(chat=True, others=list(others))
    if template is not None:
        tokenizer.chat_template = template
    return replace(make_policy("llama"), tokenizer=tokenizer)


def ids_of(batch, row: int = 0) -> list[int]:
    return batch.sequence(row)[0].tolist()


def told(notes, words: str) -> list[str]:
    return [note for note in notes if words in note]


DATED = (
    "{% if day is not defined %}{% set day = strftime_now('w%d w%m') %}{% endif %}{{ day }} {{ messages[0].content }}"
)


@pytest.mark.parametrize("name", ["native", "trl", "ms_swift"])
def test_a_template_that_puts_in_a_date_gets_that_of_the_log(tmp_path, name):
    policy = policy_of(DATED)
    row = {"prompt": CHAT, "response": "w7"}
    if name != "native":
        row = {"prompt": CHAT, "completion": "w7", "step": 1, "advantage": 1.0}
    if name == "ms_swift":
        row = {n: [v] for n, v in (row | {"advantages": 1.0}).items() if n != "advantage"}
    path = write_jsonl(tmp_path / "r.jsonl", [row])
    written = datetime(2025, 11, 26, 12).timestamp()
    os.utime(path, (written, written))
    dump = read_dump(path, policy)
    assert ids_of(dump.batch) == [26, 11, 4, 5, 7]
    assert told(dump.notes, "2025-11-26")
    asked = read_dump(path, policy, chat_template_kwargs={"strftime_now": "2024-12-31"})
    assert ids_of(asked.batch)[:2] == [31, 12] and not told(asked.notes, "last written")
    given = read_dump(path, policy, chat_template_kwargs={"day": "w9"})
    assert ids_of(given.batch)[0] == 9 and not told(given.notes, "last written")
    with refused("strftime_now", "tomorrow"):
        read_dump(path, policy, chat_template_kwargs={"strftime_now": "tomorrow"})


TEXTS = {
    "native": lambda p, r: {"prompt": p, "response": r},
    "trl": lambda p, r: {"prompt": p, "completion": r, "step": 1, "advantage": 1.0},
    "verl": lambda p, r: {"input": p, "output": r, "score": 1.0, "step": 1},
    "verifiers": lambda p, r: {"prompt": p, "completion": r, "reward": 1.0, "example_id": 1},
    "ms_swift": lambda p, r: {"prompt": [p], "completion": [r], "advantages": [1.0], "step": ["1"]},
    "roll": lambda p, r: {"prompt": [p], "responses": [r], "scores": [1.0]},
}


@pytest.mark.parametrize(
    "written", [json.dumps, str, lambda chat: json.dumps(chat, indent=1)], ids=["json", "repr", "indented"]
)
@pytest.mark.parametrize("name", TEXTS)
def test_a_chat_that_was_written_as_a_string_is_the_chat(tmp_path, name, written):
    policy = policy_of()
    answer = [{"role": "assistant", "content": "w7"}]
    plain = write_jsonl(tmp_path / "plain.jsonl", [TEXTS[name](CHAT, "w7")])
    path = write_jsonl(tmp_path / "r.jsonl", [TEXTS[name](written(CHAT), written(answer))])
    dump = read_dump(path, policy, format=name)
    assert ids_of(dump.batch) == ids_of(read_dump(plain, policy, format=name).batch)
    assert told(dump.notes, "written as a string")


def test_a_string_that_only_looks_like_a_chat_is_counted(tmp_path):
    policy = policy_of(others=("[{'role':", "'user'}", "w9}]"))
    rows = [{"prompt": "[{'role': 'user'} w9}]", "response": "w7"}, {"prompt": "w4", "response": "w7"}]
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", rows), policy)
    assert len(told(dump.notes, "1 of 2 responses: their prompt or response looks like a chat")) == 1


NAMES = "{% for m in messages %}{{ m.content }}{% if m.name is defined %} w30{% endif %}"
NAMES += "{% if 'tool_calls' in m %} w31{% endif %}"
NAMES += "{% if m.function is defined and 'strict' in m.function %} w32{% endif %} {% endfor %}"


@pytest.mark.parametrize("name", TEXTS)
def test_nulls_that_tables_put_into_messages_are_dropped_by_every_reader(tmp_path, name):
    policy = policy_of(NAMES)
    message = CHAT[0] | {"tool_calls": None, "name": None, "function": {"strict": None}}
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", [TEXTS[name]([message], "w7")]), policy, format=name)
    assert ids_of(dump.batch) == [4, 5, 7]


def test_special_words_that_the_tokenizer_takes_for_text_are_counted(tmp_path):
    policy = policy_of(others=("<", "bos", ">"))
    rows = [{"prompt": "<bos> w4", "response": "w7"}, {"prompt": "w4", "response": "w7"}]
    path = write_jsonl(tmp_path / "r.jsonl", rows)
    assert not told(read_dump(path, policy).notes, "special token")

    def as_text(text, **_):
        ids = policy.tokenizer.convert_tokens_to_ids(text.replace("<bos>", "w9 w10").split())
        return type("Encoding", (), {"input_ids": ids})

    blind = policy.tokenizer
    stand_in = type("Blind", (type(blind),), {"__call__": lambda self, text, **how: as_text(text)})
    blind.__class__ = stand_in
    blind.unk_token = None
    policy = replace(policy, tokenizer=blind)
    assert len(told(read_dump(path, policy).notes, "1 of 2 responses: their text holds <bos>")) == 1


def test_what_is_left_of_a_cut_character_is_not_tokenized(tmp_path):
    policy = policy_of(others=("\ufffd",))
    rows = [
        {"prompt": "w4", "response": "w7 w8\ufffd"},
        {"prompt": "w4", "response": "w7 \ufffd w8"},
        {"prompt": "w4", "response": "\ufffd"},
    ]
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", rows), policy)
    assert ids_of(dump.batch) == [4, 7, 8] and len(dump.batch) == 2  # nothing is left of the third
    assert len(told(dump.notes, "1 of 2 responses: their text is cut inside a character")) == 1
    assert len(told(dump.notes, "1 of 2 responses: their text holds \ufffd")) == 1


@pytest.mark.parametrize("opened", ["<think> </think>", "<think>"])
def test_thinking_tags_of_the_template_that_the_response_repeats_are_counted(tmp_path, opened):
    policy = policy_of("{{ messages[0].content }} " + opened, others=("<think>", "</think>"))
    rows = [{"prompt": CHAT, "response": f"{opened} w7"}, {"prompt": CHAT, "response": "w7"}]
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", rows), policy)
    assert len(told(dump.notes, "1 of 2 responses: the thinking tags")) == 1


def test_the_content_of_a_message_that_is_null_stays(tmp_path):
    policy = policy_of("{% for m in messages %}{{ 'w9' if m.content is none else m.content }} {% endfor %}")
    chat = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "id": None}]}, *CHAT]
    batch = read_rollouts(write_jsonl(tmp_path / "r.jsonl", [{"prompt": chat, "response": "w7"}]), policy)
    # From 5.24 on, transformers itself drops a message's keys whose value is None.
    templated = policy.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert templated in ([4, 5, 9, 4, 5], [4, 5, 4, 5])
    assert ids_of(batch) == [*templated, 7]


def test_bos_is_put_in_once_for_a_chat_that_was_a_string(tmp_path):
    policy = policy_of("{{ bos_token }}{{ messages[0].content }}")
    path = write_jsonl(tmp_path / "r.jsonl", [{"prompt": json.dumps(CHAT), "response": "w7"}])
    assert ids_of(read_rollouts(path, policy)) == [BOS, 4, 5, 7]


def test_a_chat_under_messages_or_as_numpy_prints_it_is_the_chat(tmp_path):
    policy = policy_of()
    chat = [{"role": "system", "content": "w9"}, *CHAT]
    printed = "[{'content': 'w9', 'role': 'system'}\n {'content': 'w4 w5', 'role': 'user'}]"
    rows = [
        {"prompt": prompt, "response": "w7"}
        for prompt in (chat, {"messages": chat}, json.dumps({"messages": chat}), printed)
    ]
    batch = read_rollouts(write_jsonl(tmp_path / "r.jsonl", rows), policy)
    assert [ids_of(batch, row) for row in range(4)] == [ids_of(batch)] * 4


def test_a_tokenizer_that_renders_chats_by_code_of_its_own_is_asked(tmp_path):
    policy = policy_of()

    class Renders(type(policy.tokenizer)):  # as mistral-common's, which has no template
        chat_template = None

        def apply_chat_template(self, chat, **how):
            return [BOS, 9, *self.convert_tokens_to_ids(chat[0]["content"].split())]

    policy.tokenizer.__class__ = Renders
    policy.tokenizer.__dict__.pop("chat_template", None)
    path = write_jsonl(tmp_path / "r.jsonl", [{"prompt": CHAT, "response": "w7"}])
    assert ids_of(read_rollouts(path, policy)) == [BOS, 9, 4, 5, 7]


def test_a_folder_whose_tokenizer_only_mistral_common_reads_is_loaded_for_ids(tmp_path):
    model = save_checkpoint(tmp_path / "model", "llama")
    for file in model.glob("*token*"):
        file.unlink()
    (model / "tekken.json").write_text("{}")
    if find_spec("mistral_common"):
        pytest.skip("mistral-common is there")
    with pytest.warns(UserWarning, match="mistral-common"):
        policy = load_policy(model)
    ids = write_jsonl(tmp_path / "ids.jsonl", [{"prompt_ids": [4], "response_ids": [5]}])
    assert len(read_rollouts(ids, policy)) == 1
    with refused("mistral-common"):
        read_rollouts(write_jsonl(tmp_path / "r.jsonl", [{"prompt": "w4", "response": "w7"}]), policy)
