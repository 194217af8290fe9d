"""The rules that all readers share: steps, BOS, unknown values, groups, the template's arguments, what speaks against a
batch."""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from dataclasses import replace

import pytest
import torch
from support import dumps
from support.cli import outcome_of
from support.dumps import SAMPLES
from support.policies import BOS, EOS, make_policy, make_tokenizer, save_checkpoint, write_jsonl
from support.refusals import refused
from tokenizers.processors import TemplateProcessing

from gradscope import load_policy
from gradscope.objective import grpo_advantages, resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import (
    READERS,
    Note,
    Response,
    collate,
    own_first,
    own_responses,
    read_checkpoint_dump,
    read_dump,
    read_inputs,
    read_rollouts,
    write_rollouts,
)

nan, inf = math.nan, math.inf
THINKING = (
    "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}{% if enable_thinking is defined and not "
)
THINKING += "enable_thinking %} w9 w9{% endif %}"
CHAT = [{"role": "user", "content": "w4 w5"}]
CAVEATS = ("zero-advantages", "groups-of-one", "impossible-advantages", "mixed-groups", "certain-tokens", "padding")


def kinds(notes) -> list[str]:
    return [note.kind for note in notes if note.kind in CAVEATS]


def policy_of(tokenizer) -> Policy:
    model = make_policy("llama")
    return Policy(model.model, tokenizer, model.blocks_name)


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Its tokenizer puts BOS before text, as Llama's does; its template writes BOS and knows a switch."""
    tokenizer = make_tokenizer(chat=True)
    pairs = [("<s>", BOS)] if "<s>" in tokenizer.get_vocab() else [(tokenizer.bos_token, BOS)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{pairs[0][0]} $A", pair=f"{pairs[0][0]} $A $B", special_tokens=pairs
    )
    tokenizer.chat_template = THINKING
    return policy_of(tokenizer)


def row(step: int, reward: float, **more) -> dict:
    return {"prompt_ids": [4, 5], "response_ids": [7, 8], "reward": reward, "step": step, "temperature": 1.0} | more


# Steps of native rows


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("named", [{}, {"group": "q"}])
def test_groups_of_native_rows_are_within_a_step(tmp_path, suffix, named):
    rewards = {0: [1.0, 0.0, 0.0], 100: [1.0, 1.0, 0.0]}
    rows = [row(step, reward, **named) for step, own in rewards.items() for reward in own]
    dump = read_dump(write_rollouts(tmp_path / f"r{suffix}", rows))
    assert dump.batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1] and dump.steps.tolist() == [0] * 3 + [100] * 3
    found = resolve_advantages(dump.batch)[dump.batch.response_mask][::2]
    wanted = [(r - statistics.mean(own)) / (statistics.stdev(own) + 1e-6) for own in rewards.values() for r in own]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-6, atol=0)


def test_a_step_of_native_rows_is_picked_by_number_or_by_the_checkpoint_and_several_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [row(step, r) for step in (1, 101, 102) for r in (0.0, 1.0)])
    with refused("3", "102"):
        read_rollouts(path)
    assert len(read_rollouts(path, step="all")) == 6
    assert read_rollouts(path, step=101).steps.tolist() == [101, 101]
    with refused("step 7", "1, 101, 102"):
        read_dump(path, step=7)
    assert read_checkpoint_dump(path, None, 100).steps.tolist() == [101, 101]


def test_what_a_log_has_beside_the_reward_is_kept_through_selecting_and_writing(tmp_path, policy):
    parts = [{"right": 1, "form": 0.2}, {"right": True, "form": None}, {"form": -1.0, "note": "w"}]
    native = [row(1, 0.5) | {"reward_parts": own} for own in parts]
    keyed = [row(1, own | {"score": 0.5}) for own in parts]
    trl = [{"step": 1, "prompt": "w4", "completion": "w7", "advantage": 0.5} | own for own in parts]
    verl = [{"step": 1, "input": "w4", "output": "w7", "score": 0.5} | own for own in parts]
    for name, rows, keys in (("native", native, {}), ("keyed", keyed, {"reward_key": "score"}), ("trl", trl, {}),
                             ("verl", verl, {})):  # fmt: skip
        batch = read_dump(write_jsonl(tmp_path / f"{name}.jsonl", rows), policy, **keys).batch
        again = read_dump(write_rollouts(tmp_path / f"{name}.parquet", batch)).batch
        for found in (batch, batch[[0, 1, 2]], again):
            told = {name: own.tolist() for name, own in found.reward_parts.items() if name != "score"}
            assert told == {"right": pytest.approx([1, 1, nan], nan_ok=True),
                            "form": pytest.approx([0.2, nan, -1], nan_ok=True)}  # fmt: skip
        assert batch[[2]].reward_parts["form"].tolist() == [-1.0]
        assert batch.digest() == replace(batch, reward_parts=None).digest()  # they change no number
    with refused("reward_parts", "dictionary"):
        read_dump(write_jsonl(tmp_path / "bad.jsonl", [row(1, 0.5, reward_parts=[1])]))


@pytest.mark.parametrize("advantages", [False, True])
def test_earlier_steps_are_taken_until_so_many_prompts_have_an_advantage(tmp_path, policy, advantages):
    served = {1: 3, 2: 3, 3: 0, 5: 2, 6: 0, 7: 1, 8: 1, 9: 4}  # prompts with an advantage, of five
    rows = [
        row(step, reward, group=prompt) | ({"advantage": (2 * reward - 1) * (prompt < count)} if advantages else {})
        for step, count in served.items() for prompt in range(5) for reward in (1.0, float(prompt >= count))
    ]  # fmt: skip
    path = write_jsonl(tmp_path / "r.jsonl", rows)
    for checkpoint in range(9):
        for prompts in (0, 2, 3, 6, 9):
            dump = read_checkpoint_dump(path, policy, checkpoint, prompts=prompts)
            own = min(served, key=lambda step: (abs(step - checkpoint - 1), step))
            runs = [[step for step in served if first <= step <= own] for first in sorted(served) if first <= own]
            enough = [steps for steps in runs if sum(served[step] for step in steps) >= prompts]
            wanted = min(enough, key=len) if enough else max(runs, key=len)
            assert sorted({*dump.steps.tolist()}) == wanted
            assert ("pooled" in {note.kind for note in dump.notes}) == (len(wanted) > 1)
        assert {*read_checkpoint_dump(path, policy, checkpoint, step="own", prompts=9).steps.tolist()} == {own}
    assert {*read_checkpoint_dump(path, policy, 3, step="all").steps.tolist()} == {*served}


@pytest.mark.parametrize(
    "name", ["step_{}/r.jsonl", "rollouts_step_{}.jsonl", "global_step_{}.jsonl", "iter_{:07}.jsonl"]
)
def test_files_named_after_their_steps_tell_those_of_rows_that_name_none(tmp_path, name):
    for step in (2, 10):
        (path := tmp_path / name.format(step)).parent.mkdir(exist_ok=True)
        write_jsonl(path, [{k: v for k, v in row(0, reward).items() if k != "step"} for reward in (1.0, 0.0)])
    dump = read_dump(tmp_path)
    assert dump.steps.tolist() == [2, 2, 10, 10] and dump.batch.group_ids.tolist() == [0, 0, 1, 1]
    one = read_dump(path)
    assert one.steps is None  # of one file the name may be anything's
    with refused("2", "10"):
        read_rollouts(tmp_path)


def test_a_column_of_a_row_beats_the_name_of_its_file_and_may_be_called_as_trainers_call_it(tmp_path):
    for at, named in enumerate(["step", "global_step", "training_step", "train_step"]):
        given = row(0, 1.0) | {named: 100 + at}
        write_jsonl(tmp_path / f"step_{at}.jsonl", [given if named == "step" else given | {"step": None}])
    assert read_dump(tmp_path).steps.tolist() == [100, 101, 102, 103]
    assert read_dump(tmp_path / "step_2.jsonl").steps.tolist() == [102]


def test_a_step_is_kept_in_writing_and_read_from_whole_floats_and_a_fraction_is_refused(tmp_path):
    batch = read_rollouts(write_jsonl(tmp_path / "r.jsonl", [row(3, 0.0), row(4, 1.0)]), step="all")
    for suffix in (".jsonl", ".parquet"):
        again = read_rollouts(write_rollouts(tmp_path / f"again{suffix}", batch), step="all")
        assert again.steps.tolist() == [3, 4] and again.group_ids.tolist() == batch.group_ids.tolist()
    assert read_rollouts(write_jsonl(tmp_path / "f.jsonl", [row(3.0, 0.0), row("3", 0.0)])).steps.tolist() == [3, 3]
    with refused("step"):
        read_rollouts(write_jsonl(tmp_path / "bad.jsonl", [row(3.5, 0.0)]))


def test_every_command_picks_a_step_of_native_rows_and_measure_the_checkpoints_own(tmp_path, capsys):
    model = save_checkpoint(tmp_path / "checkpoint-100", "llama")
    rows = [row(step, r, response_ids=[7, 8, 9][: step % 100]) for step in (3, 101, 102) for r in (0.0, 1.0)]
    path, out = write_jsonl(tmp_path / "r.jsonl", rows), tmp_path / "out"
    for command in ("measure", "compare", "diagnose"):
        given = [model, "--rollouts", path] if command == "diagnose" else [model, path]
        ended = outcome_of(capsys, command, *given, "--out", out, "--step", 5)
        assert ended.status == 2 and "no step 5; it has 3, 101, 102" in ended.err and not out.exists()
    for step, tokens in ((None, 2), (102, 4), (3, 6)):
        flags = [] if step is None else ["--step", step]
        out = tmp_path / f"out-{step}"
        assert outcome_of(capsys, "measure", model, path, "--out", out, "--no-figures", *flags).status == 0
        assert json.loads((out / "manifest.json").read_text())["tokens"] == tokens


# BOS


def test_text_has_bos_once_whether_it_begins_with_it_or_not(policy, tmp_path):
    bos = policy.tokenizer.bos_token
    assert policy.encode_prompt("w4 w5") == [BOS, 4, 5]
    assert policy.encode_prompt(f"{bos} w4 w5") == policy.encode_prompt(f"{bos}w4 w5") == [BOS, 4, 5]
    assert policy.encode_prompt(CHAT)[:2] == [BOS, 4]
    plain = policy_of(make_tokenizer())  # puts nothing before text
    assert plain.encode_prompt(f"{bos} w4") == [BOS, 4] and plain.encode_prompt("w4") == [4]


TEXTS = {"native": ("prompt", "response"), "verl": ("input", "output"), "verifiers": ("prompt", "completion")}
TEXTS |= {"trl": ("prompt", "completion"), "ms_swift": ("prompt", "completion"), "roll": ("prompt", "responses")}


@pytest.mark.parametrize("name", TEXTS)
def test_every_format_of_text_has_bos_once(policy, tmp_path, name):
    templated = f"{policy.tokenizer.bos_token} w4 w5"
    prompt, response = TEXTS[name]
    columns = {prompt: templated, response: "w7", "step": 1, "advantage": 1.0, "advantages": 1.0, "score": 1.0}
    columns |= {"scores": 1.0, "example_id": 1, "reward": 1.0, "global_step": 1}
    names = READERS[name].needs | {prompt, response}
    one = {column: value for column, value in columns.items() if column in names}
    if name in ("ms_swift", "roll"):
        one = {column: [value] for column, value in one.items()}
    path = write_rollouts(tmp_path / f"r{'.parquet' if name == 'trl' else '.jsonl'}", [one])
    dump = read_dump(path, policy, format=name)
    assert dump.batch.sequence(0)[0].tolist() == [BOS, 4, 5, 7]


def test_sampling_begins_a_templated_prompt_with_bos_once(policy):
    from gradscope import sample

    batch = sample(policy, [f"{policy.tokenizer.bos_token} w4 w5", "w4 w5", CHAT], n=1, max_new_tokens=2)
    starts = [batch.sequence(place)[0].tolist()[:3] for place in range(3)]
    assert starts == [[BOS, 4, 5]] * 3


# Arguments of the chat template


def test_the_templates_arguments_are_of_the_policy_of_the_reading_or_of_the_row_and_the_reading_beats_the_row(
    policy, tmp_path
):
    from dataclasses import replace

    off = {"enable_thinking": False}
    plain, switched = [BOS, 4, 5], [BOS, 4, 5, 9, 9]
    assert policy.encode_prompt(CHAT) == plain
    assert policy.encode_prompt(CHAT, chat_template_kwargs=off) == switched
    assert replace(policy, chat_template_kwargs=off).encode_prompt(CHAT) == switched
    rows = [{"prompt": CHAT, "response": "w7", "chat_template_kwargs": given} for given in (None, off, json.dumps(off))]
    read = {
        "none": read_rollouts(write_jsonl(tmp_path / "r.jsonl", rows), policy),
        "on": read_rollouts(tmp_path / "r.jsonl", policy, chat_template_kwargs={"enable_thinking": True}),
        "off": read_rollouts(tmp_path / "r.jsonl", policy, chat_template_kwargs=off),
    }
    found = {name: [batch.sequence(place)[0].tolist()[:-1] for place in range(3)] for name, batch in read.items()}
    assert found == {"none": [plain, switched, switched], "on": [plain] * 3, "off": [switched] * 3}


def test_arguments_of_the_template_that_change_nothing_are_refused(policy, tmp_path):
    chat = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": CHAT, "response": "w7"}])
    ids = write_jsonl(tmp_path / "ids.jsonl", [{"prompt_ids": [4], "response_ids": [7]}])
    for path, given in ((chat, "enable_thinkin"), (chat, "tokenize"), (ids, "enable_thinking")):
        with refused("chat_template_kwargs" if path == ids else given):
            read_rollouts(path, policy, chat_template_kwargs={given: False})
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": CHAT, "response": "w7", "chat_template_kwargs": "[1]"}])
    with refused("row 0", "chat_template_kwargs"):
        read_rollouts(bad, policy)


def test_the_flag_takes_an_object_of_json_in_every_command_that_templates(policy, tmp_path, capsys):
    model = save_checkpoint(tmp_path / "model", "llama")
    policy.tokenizer.save_pretrained(model)
    chat = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": CHAT, "response": "w7 w8", "advantage": 1.0}])
    for given in ("{enable", "[1]"):
        ended = outcome_of(capsys, "measure", model, chat, "--out", tmp_path / "out", "--chat-template-kwargs", given)
        assert ended.status == 2 and not (tmp_path / "out").exists()
    prompts, out = write_jsonl(tmp_path / "p.jsonl", [{"prompt": CHAT}]), tmp_path / "sampled.jsonl"
    flags = ["--chat-template-kwargs", '{"enable_thinking": false}']
    asked = ["--prompts", prompts, "--n", 1, "--max-new-tokens", 2, "--out", out]
    assert outcome_of(capsys, "sample", model, *asked, *flags).status == 0
    assert json.loads(out.read_text().splitlines()[0])["prompt_ids"] == [BOS, 4, 5, 9, 9]
    assert load_policy(model, chat_template_kwargs={"enable_thinking": False}).encode_prompt(CHAT)[-1] == 9
    ended = outcome_of(capsys, "measure", model, chat, "--out", tmp_path / "out", "--no-figures", *flags)
    assert ended.status == 0
    key = json.loads((tmp_path / "out" / "manifest.json").read_text())["key"]
    assert key["chat_template_kwargs"] == {"enable_thinking": False}


TASK = """
from gradscope.tasks import Question

class Chats:
    name = "chats"
    def questions(self, n, *, seed, **options):
        return [Question([{"role": "user", "content": "w4 w5"}], None) for _ in range(n)]
    def reward(self, response, question):
        return float(len(response) % 3)

chats = Chats()
"""


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_commands_that_ask_the_questions_of_a_task_template_them_with_the_arguments(policy, tmp_path, capsys, command):
    import pandas as pd

    model, out = save_checkpoint(tmp_path / "model", "llama"), tmp_path / "out"
    policy.tokenizer.save_pretrained(model)
    (tmp_path / "own.py").write_text(TASK)
    flags = ["--chat-template-kwargs", '{"enable_thinking": false}', "--max-new-tokens", 40, "--out", out]
    flags += ["--task", f"{tmp_path / 'own.py'}:chats"]
    if command == "train":
        flags += ["--model", model, "--steps", 1, "--questions-per-step", 1, "--group-size", 8, "--save-rollouts"]
        flags += ["--trackers", "--device", "cpu", "--save-every", 1]
    else:
        flags = [model, "--questions", 1, "--k", 1, *flags]
    assert outcome_of(capsys, command, *flags).status == 0
    rows = pd.read_parquet(next(iter(out.rglob("rollouts/*.parquet" if command == "train" else "responses.parquet"))))
    assert {tuple(ids) for ids in rows["prompt_ids"]} == {(BOS, 4, 5, 9, 9)}


# What null, NaN and infinity mean


@pytest.mark.parametrize("hole", [None, nan, inf, -inf])
@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "sampler_logprobs"])
def test_a_log_probability_that_is_not_known_leaves_its_token_in_and_is_counted(tmp_path, name, hole):
    rows = [row(1, 0.0, **{name: [-0.5, hole]}), row(1, 1.0)]
    batch = read_rollouts(write_jsonl(tmp_path / "r.jsonl", rows))
    assert batch.num_tokens == 4
    found = getattr(batch, name)[batch.response_mask].tolist()
    assert found[0] == -0.5 and all(math.isnan(value) for value in found[1:])
    [note] = [note for note in batch.notes if note.kind == "unknown-values"]
    assert "3 of 4 tokens" in note and name in note


@pytest.mark.parametrize("value", [None, nan, inf, 1e39, 10**400, 0.5])
def test_what_stands_at_a_token_that_was_not_sampled_is_no_matter(tmp_path, value):
    own = {name: [-0.5, value, -1.5] for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs")}
    whole = row(1, 1.0, response_ids=[7, 8, 9], response_mask=[1, 0, 1], advantage=[1.0, value, 1.0], **own)
    batch = read_rollouts(write_jsonl(tmp_path / "r.jsonl", [whole]))
    assert batch.old_logprobs[batch.response_mask].tolist() == [-0.5, -1.5]
    assert batch.advantages[batch.response_mask].tolist() == [1.0, 1.0]
    assert not {note.kind for note in batch.notes} & {"unknown-values", "left-out"}


@pytest.mark.parametrize("hole", [None, nan, inf, -inf])
def test_a_response_without_an_advantage_or_else_without_a_reward_is_left_out_and_counted(tmp_path, hole):
    known = [row(1, 9.0, advantage=-1.0), row(1, 9.0, advantage=1.0)]
    batch = read_rollouts(write_jsonl(tmp_path / "a.jsonl", [*known, row(1, 9.0, advantage=hole)]))
    assert len(batch) == 2 and any("1 of 3 rows" in n for n in batch.notes if n.kind == "left-out")
    batch = read_rollouts(write_jsonl(tmp_path / "r.jsonl", [row(1, 0.0), row(1, hole), row(1, 1.0)]))
    assert batch.rewards.tolist() == [0.0, 1.0] and any("1 of 3 rows" in n for n in batch.notes)
    # A reward that no number depends on leaves nothing out.
    batch = read_rollouts(write_jsonl(tmp_path / "both.jsonl", [*known, row(1, hole, advantage=0.5)]))
    assert len(batch) == 3
    # Of a list of advantages the token alone is left out.
    batch = read_rollouts(write_jsonl(tmp_path / "t.jsonl", [*known, row(1, 1.0, advantage=[0.5, hole])]))
    assert batch.num_tokens == 5 and any("1 token of 1 response " in n for n in batch.notes)


@pytest.mark.parametrize("gone", [{"response_ids": []}, {"response_mask": [0, 0]}], ids=["empty", "masked"])
def test_a_response_without_a_token_is_left_out_and_its_reward_counts_in_its_group(tmp_path, gone):
    rows = [row(1, 1.0), row(1, 1.0), row(1, 0.0, **gone), row(1, 0.25)]
    batch = read_rollouts(write_jsonl(tmp_path / "r.jsonl", rows))
    assert len(batch) == 3 and any("1 of 4 rows" in note for note in batch.notes if note.kind == "left-out")
    whole = [1.0, 1.0, 0.0, 0.25]
    wanted = [(r - statistics.mean(whole)) / (statistics.stdev(whole) + 1e-6) for r in (1.0, 1.0, 0.25)]
    torch.testing.assert_close(resolve_advantages(batch)[:, 2], torch.tensor(wanted), rtol=1e-6, atol=0)
    for part in (batch[[0, 2]], read_rollouts(write_rollouts(tmp_path / "again.jsonl", batch[[0, 2]]))):
        torch.testing.assert_close(resolve_advantages(part)[:, 2], torch.tensor(wanted)[[0, 2]], rtol=1e-6, atol=0)
    with refused():
        read_rollouts(write_jsonl(tmp_path / "none.jsonl", [row(1, 1.0, **gone)]))


def test_a_temperature_that_is_not_the_logs_is_used_and_said(tmp_path):
    rows = [{"prompt_ids": [5], "response_ids": [7, 8], "reward": 1.0, "temperature": t} for t in (1.0, 1.0, 0.5)]
    path = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    for given, said in ((None, []), (0.5, ["2 of 3"]), (2.0, ["2 of 3", "1 of 3"])):
        batch = read_rollouts(path, temperature=given)
        notes = [note for note in batch.notes if note.kind == "other-temperature"]
        assert len(notes) == len(said) and all(note.startswith(words) for note, words in zip(notes, said, strict=True))
        assert batch.temperature.tolist() == ([given] * 3 if given else [1.0, 1.0, 0.5])


def test_prompts_that_the_checkpoint_sampled_itself_come_first_where_earlier_steps_were_added():
    responses = [Response([5, n], [7], group=n, step=step) for n, step in enumerate((4, 5, 4, 5, 4))]
    pooled = replace(collate(responses), notes=(Note("…", "pooled"),))
    order = torch.tensor([2, 4, 3, 0, 1])
    assert own_first(pooled, order).tolist() == [3, 1, 2, 4, 0]
    assert own_responses(pooled).tolist() == [False, True, False, True, False]
    # Also where only others' tokens are left in use.
    assert own_responses(pooled.of_prompts([0, 2])).tolist() == [False, True, False, True, False]
    assert own_first(collate(responses), order).tolist() == order.tolist() and own_responses(collate(responses)) is None
    assert not own_responses(replace(pooled, notes=(Note("…", "other-step"),))).any()


def test_a_reward_that_is_a_dictionary_is_the_entry_that_is_named(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [row(1, {"acc": r, "form": 0.5}) for r in (0.0, 1.0)])
    assert read_rollouts(path, reward_key="acc").rewards.tolist() == [0.0, 1.0]
    for key, named in ((None, "acc, form"), ("accuracy", "accuracy")):
        with refused(named):
            read_rollouts(path, reward_key=key)
    with refused():
        read_rollouts(write_jsonl(tmp_path / "plain.jsonl", [row(1, 1.0)]), reward_key="acc")


# Groups of one


def test_a_response_alone_in_its_group_gets_what_its_trainer_gives_it(policy, tmp_path):
    scores = {"a": [0.75], "b": [1.0, 0.0]}
    rows = [
        {"input": f"w{4 + at}", "output": "w7 w8", "score": score, "step": 1}
        for at, own in enumerate(scores.values())
        for score in own
    ]
    verl = read_rollouts(write_jsonl(tmp_path / "verl.jsonl", rows), policy)
    native = [row(1, r["score"], prompt_ids=[int(r["input"][1:])]) for r in rows]
    own = read_rollouts(write_jsonl(tmp_path / "native.jsonl", native))
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    for batch, alone in ((verl, 0.75), (own, 0.0)):
        found = [float(resolve_advantages(batch)[place][batch.response_mask[place]][0]) for place in range(3)]
        assert found == pytest.approx([alone, half, -half], rel=2e-6)
        assert kinds(batch.notes) == ["groups-of-one"]
    again = read_rollouts(write_rollouts(tmp_path / "again.jsonl", verl))
    assert torch.equal(resolve_advantages(again).nan_to_num(), resolve_advantages(verl).nan_to_num())
    assert grpo_advantages(torch.tensor([0.75]), torch.tensor([0])).item() == 0  # the function's own rule stays


# What speaks against a batch


def test_advantages_that_are_all_zero_are_said_with_their_cause(tmp_path):
    alone = [row(1, float(p), prompt_ids=[4, p + 4]) for p in range(3)]
    equal = [row(1, 1.0), row(1, 1.0)]
    given = [row(1, 1.0, advantage=0.0), row(1, 0.0, advantage=0.0)]
    cases = {"alone": (alone, ["zero-advantages", "groups-of-one"], "3 groups of one response")}
    cases |= {
        "equal": (equal, ["zero-advantages"], "equal rewards"),
        "given": (given, ["zero-advantages"], "in the log"),
    }
    for name, (rows, wanted, words) in cases.items():
        batch = read_rollouts(write_jsonl(tmp_path / f"{name}.jsonl", rows))
        assert sorted(kinds(batch.notes)) == sorted(wanted)
        assert any(words in note for note in batch.notes if note.kind == "zero-advantages")
        assert not resolve_advantages(batch)[batch.response_mask].any()
    assert not kinds(read_rollouts(write_jsonl(tmp_path / "some.jsonl", [*equal, row(1, 0.0)])).notes)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("ddof", [0, 1])
def test_advantages_beyond_what_a_group_can_have_are_counted_and_the_largest_possible_are_not(tmp_path, size, ddof):
    rewards = torch.tensor([1.0] + [0.0] * (size - 1), dtype=torch.float64)  # nobody is further from the mean
    largest = ((rewards - rewards.mean()) / rewards.std(correction=ddof)).tolist()
    rows = [row(1, 0.0, advantage=round(a, 4)) for a in largest]
    assert not kinds(read_rollouts(write_jsonl(tmp_path / "r.jsonl", rows)).notes)
    beyond = [row(1, 0.0, advantage=1.05 * math.sqrt(size - 1) * math.copysign(1, a)) for a in largest]
    batch = read_rollouts(write_jsonl(tmp_path / "b.jsonl", beyond))
    [note] = [note for note in batch.notes if note.kind == "impossible-advantages"]
    assert f"{size} of {size} responses" in note
    # A group that lost responses may have been larger.
    empty = [row(1, 0.0, advantage=0.0, response_ids=[])] * size
    assert not kinds(read_rollouts(write_jsonl(tmp_path / "lost.jsonl", [*beyond, *empty])).notes)


def test_what_is_said_of_a_log_is_said_of_the_step_that_is_kept(tmp_path):
    rows = [row(1, 1.0), row(1, 1.0), row(2, 0.0), row(2, 1.0)]
    path = write_jsonl(tmp_path / "r.jsonl", rows)
    assert not kinds(read_dump(path).notes)
    assert kinds(read_checkpoint_dump(path, None, 0).notes) == ["zero-advantages"]
    assert not kinds(read_checkpoint_dump(path, None, 1).notes)


def test_runs_of_certain_tokens_are_counted_where_certain_tokens_are_rare(tmp_path):
    torch.manual_seed(0)

    def log(certain: float, tool: int, *, dropped: bool = False) -> list[dict]:
        """16 responses of 40 tokens, a share of them certain by themselves, and in the first a tool's output."""
        rows = []
        for place in range(16):
            logs = torch.where(torch.rand(40) < certain, 0.0, -torch.rand(40) - 0.1)
            mask = [True] * 40
            if place == 0:
                logs[10 : 10 + tool] = 0.0
                mask[10 : 10 + tool] = [not dropped] * tool
            rows.append(row(1, place % 2, response_ids=[7] * 40, old_logprobs=logs.tolist(), response_mask=mask))
        return rows

    def told(rows: list[dict]) -> list[str]:
        path = write_jsonl(tmp_path / "r.jsonl", rows)
        return [note for note in read_rollouts(path).notes if note.kind == "certain-tokens"]

    assert not told(log(0.0, 0)) and not told(log(0.3, 0)) and not told(log(0.0, 6, dropped=True))
    [note] = told(log(0.0, 6))
    assert "6 tokens of 1 response," in note
    [note] = told(log(0.05, 30))
    assert "30 tokens" in note or "31 tokens" in note  # a neighbour may be certain too


def test_groups_of_several_prompts_are_counted_where_rewards_are_compared(tmp_path):
    def told(rows):
        notes = read_rollouts(write_jsonl(tmp_path / "r.jsonl", rows)).notes
        return [int(note.split()[0]) for note in notes if note.kind == "mixed-groups"]

    rows = [row(1, reward, prompt_ids=[4, 5 + place], group=place // 2) for place in (0, 2) for reward in (0.0, 1.0)]
    assert not told(rows)
    mixed = [row(1, 0.5, prompt_ids=[4, 9], group=1), *rows]
    assert told(mixed) == [1] and not told([one | {"advantage": 0.5} for one in mixed])


def test_tokens_behind_an_end_and_padding_that_count_as_sampled_are_counted(policy, tmp_path):
    PAD = policy.tokenizer.pad_token_id
    cases = [
        ([7, 8, EOS], None, 0),
        ([7, EOS, EOS, EOS], None, 2),
        ([7, 8, PAD, PAD], None, 2),
        ([7, EOS, PAD, PAD], [1, 1, 0, 0], 0),
        ([7, EOS, 9, 10, 11, EOS], [1, 1, 0, 0, 1, 1], 0),  # a turn, a tool's output, another turn
        ([7, EOS, 9, 10, 11, EOS], None, 4),
        ([EOS, 9, 8, 7], [1, 0, 1, 1], 0),
    ]
    rows = [
        row(1, place % 2, response_ids=ids) | ({} if mask is None else {"response_mask": mask})
        for place, (ids, mask, _) in enumerate(cases)
    ]
    told = [note for note in read_rollouts(write_jsonl(tmp_path / "r.jsonl", rows), policy).notes]
    [note] = [note for note in told if note.kind == "padding"]
    counts = [count for _, _, count in cases]
    assert [int(word) for word in note.split() if word.isdigit()] == [sum(counts), sum(map(bool, counts))]
    clean = [one for one, count in zip(rows, counts, strict=True) if not count]
    assert "padding" not in kinds(read_rollouts(write_jsonl(tmp_path / "c.jsonl", clean), policy).notes)
    prompts = [[PAD, PAD, 4, 5], [PAD, 4], [EOS, EOS, 4], [EOS, 4], [4, 5], [BOS, 4]]
    rows = [row(1, place % 2, prompt_ids=ids) for place, ids in enumerate(prompts)]
    notes = read_rollouts(write_jsonl(tmp_path / "p.jsonl", rows), policy).notes
    assert [note.split()[:3] for note in notes if note.kind == "padding"] == [["3", "of", "6"]]


def test_an_end_that_nobody_sampled_is_counted(tmp_path):
    policy = make_policy("llama", tokenizer=True)
    assert EOS in policy.stop_ids
    rows = [
        row(1, r, response_ids=[7, 8, EOS], old_logprobs=[-1.0, -0.5, end]) for r, end in ((0.0, 0.0), (1.0, -0.25))
    ]
    path = write_jsonl(tmp_path / "r.jsonl", rows)
    [note] = [note for note in read_rollouts(path, policy).notes if note.kind == "certain-tokens"]
    assert "1 of 2 responses" in note
    sure = [*rows, row(1, 0.5, response_ids=[7, 9, EOS], old_logprobs=[-1.0, -0.5, -1e-6])]
    assert not kinds(read_rollouts(write_jsonl(tmp_path / "sure.jsonl", sure), policy).notes)
    rows = [r | {"response_ids": [7, 8, 9]} for r in rows]
    assert not kinds(read_rollouts(write_jsonl(tmp_path / "other.jsonl", rows), policy).notes)


def test_a_batch_made_by_hand_is_told_the_same(policy):
    made = collate([Response([4, 5], [7, 8], group=g, reward=float(g)) for g in range(3)])
    _, batch = read_inputs(policy, made)
    assert sorted(kinds(batch.notes)) == ["groups-of-one", "zero-advantages"]


# The table of the docs


def test_every_registered_format_answers_what_is_asked_of_it(repository):
    told = tomllib.loads((repository / "docs/formats/readers.toml").read_text())
    assert [*told] == [*READERS]
    for name, answers in told.items():
        assert [*answers] == ["group", "step", "sampled", "logprobs", "left_out", "checked"], name
        assert all(answers.values()) and (repository / "docs/formats" / f"{name}.md").is_file()


@pytest.mark.parametrize("first", [0, 1])
def test_a_log_that_counts_from_zero_is_read_by_its_own_count(tmp_path, monkeypatch, first):
    from dataclasses import replace

    monkeypatch.setitem(READERS, "prime_rl", replace(READERS["prime_rl"], first_step=first))
    for step in (4, 5, 6):
        dumps.write_prime_rl(tmp_path, step=step)
    kept = read_checkpoint_dump(tmp_path / "token_exports", None, 5)
    assert kept.steps.tolist() == [5 + first] * len(SAMPLES)


def test_reading_looks_at_the_configuration_as_often_for_many_responses_as_for_few(tmp_path):
    def looks(count: int) -> int:
        policy = make_policy("qwen2")
        config, seen = policy.model.config, []

        class Counted(type(config)):
            def get_text_config(self, *args: object, **kwargs: object):
                seen.append(args)
                return super().get_text_config(*args, **kwargs)

        config.__class__ = Counted
        rows = [{"prompt_ids": [4, 5], "response_ids": [6, 7], "reward": float(i % 2)} for i in range(count)]
        assert len(read_rollouts(write_jsonl(tmp_path / f"{count}.jsonl", rows), policy)) == count
        return len(seen)

    assert looks(2) == looks(20)
