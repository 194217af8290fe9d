"""What is read of TRL's datasets, against what TRL 1.16's trainers make of the same rows before they train."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from support.policies import make_policy
from support.refusals import refused
from support.words import make_tokenizer

from gradscope.objective import LossSettings
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch, read_dump, read_rollouts

datasets = pytest.importorskip("datasets")

MARKED = (
    "{% for m in messages %}{{ '<bos> ' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + ' <eos> ' }}{% endgeneration %}{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{{ '<bos> ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<bos> w90 w91{% endif %}"
)
TOLD = (
    "{% if tools %}{{ '<bos> ' + tools[0]['function']['name'] + ' ' }}{% endif %}{% for m in messages %}"
    "{{ '<bos> ' + m['content'] + ' ' + (word or '') + ' ' }}{% endfor %}{% if add_generation_prompt %}<bos>{% endif %}"
)


def merging() -> Any:
    """A tokenizer of letters in which a and b become one token, also across the end of a prompt; it puts <s> first."""
    import transformers
    from tokenizers import Tokenizer, models, processors

    vocab = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *"abcdef ", "ab"])}
    backend = Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    known = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **known)


def words(template: str | None = None) -> Any:
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def policy_with(tokenizer: Any) -> Policy:
    model = make_policy("llama")
    return Policy(model.model, tokenizer, model.blocks_name)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHATS = [[user("w4 w5"), answer("w6 w7"), user("w8"), answer("w9")], [user("w4 w5"), answer("w10")]]
LM = {"messages": [{"messages": chat} for chat in CHATS], "text": [{"text": "w4 w5 w6"}, {"text": "w7 <eos>"}]}
COMPLETED = {
    "strings": [{"prompt": "w4 w5 ", "completion": "w6 w7"}, {"prompt": "w4", "completion": " w8 <eos>"}],
    "chats": [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS],
}
PAIRS = {
    "strings": [
        {"prompt": "w4 w5 ", "chosen": "w6 w7", "rejected": "w6 w8 w9"},
        {"prompt": "w4 ", "chosen": "w5", "rejected": "w6 <eos>"},
    ],
    "implicit strings": [
        {"chosen": "w4 w5 w6", "rejected": "w4 w5 w7 w8"},
        {"chosen": "w4 w5", "rejected": "w4 w5 w6"},
    ],
    "chats": [{"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [answer("w11 w12")]} for chat in CHATS],
    "implicit chats": [{"chosen": chat, "rejected": [*chat[:-1], answer("w11 w12")]} for chat in CHATS],
}  # fmt: skip
KTO = {
    name: [row | {"label": n == 0} for n, row in enumerate(rows)] for name, rows in COMPLETED.items()
} | {f"unpaired {name}": rows for name, rows in PAIRS.items()}  # fmt: skip
LETTERS = {
    "completed": [{"prompt": "dea", "completion": "bc"}, {"prompt": "de ", "completion": "fc</s>"}],
    "pairs": [{"prompt": "dea", "chosen": "bc", "rejected": "ca"}, {"prompt": "d ", "chosen": "e", "rejected": "f"}],
}


def bare(kind: type, tokenizer: Any, **known: Any) -> Any:
    """A trainer of TRL that can prepare a dataset and no more."""
    made = kind.__new__(kind)
    vars(made).update({"_tokenizer": tokenizer, "chat_template": None} | known)
    return made


def arguments(**known: Any) -> SimpleNamespace:
    plain = {
        "dataset_num_proc": None,
        "dataset_text_field": "text",
        "max_length": 1024,
        "truncation_mode": "keep_start",
    }
    plain |= {"assistant_only_loss": False, "shuffle_dataset": False, "per_device_train_batch_size": 2}
    return SimpleNamespace(**(plain | known))


def trls_sft(rows: list[dict], tokenizer: Any, *, completion_only_loss: bool = True, **known: Any) -> list[tuple]:
    """Ids, and the places that TRL's labels keep; the first token is predicted from nothing."""
    from trl import SFTTrainer

    made = bare(SFTTrainer, tokenizer, completion_only_loss=completion_only_loss)
    data = datasets.Dataset.from_list(rows)
    found = made._prepare_dataset(data, tokenizer, arguments(**known), False, None, "train")
    return [(r["input_ids"], [s for s, own in enumerate(r["labels"]) if own != -100 and s]) for r in found]


def kept_by(collator: Any, examples: list[dict]) -> list[tuple]:
    batch = collator.torch_call(examples)
    rows = zip(*(batch[name] for name in ("input_ids", "attention_mask", "completion_mask")), strict=True)
    return [(ids[real.bool()].tolist(), [s for s in kept.nonzero()[:, 0].tolist() if s]) for ids, real, kept in rows]


def trls_dpo(rows: list[dict], tokenizer: Any, **known: Any) -> list[tuple]:
    """The same of chosen and rejected, in turn."""
    from trl import DPOTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    args = arguments(**known)
    found = bare(DPOTrainer, tokenizer)._prepare_dataset(datasets.Dataset.from_list(rows), tokenizer, args, "train")
    sides = kept_by(DataCollatorForPreference(0, args.max_length), [*found]) if len(found) else []
    return [side for n in range(len(found)) for side in (sides[n], sides[len(found) + n])]


def trls_kto(rows: list[dict], tokenizer: Any, **known: Any) -> list[tuple]:
    """The same of each completion, with its label."""
    from trl import KTOTrainer
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    args = arguments(**known)
    made = bare(KTOTrainer, tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0)
    found = made._prepare_dataset(datasets.Dataset.from_list(rows), tokenizer, args, "train")
    kept = kept_by(DataCollatorForUnpairedPreference(0, args.max_length), [*found]) if len(found) else []
    return [(*own, label) for own, label in zip(kept, found["label"], strict=True)]


def ours(rows: list[dict], tokenizer: Any, format: str | None = None) -> tuple[TokenBatch, list[tuple]]:
    batch = read_rollouts(rows, policy_with(tokenizer), format=format)
    return batch, [tuple(values.tolist() for values in batch.sequence(row)) for row in range(len(batch))]


@pytest.mark.parametrize("template", [None, MARKED, THINKING], ids=["plain", "marked", "thinking"])
@pytest.mark.parametrize("name", [*LM, *COMPLETED])
def test_sft_rows_have_the_ids_and_labels_of_trls_sft_trainer(name, template):
    tokenizer, rows = words(template), (LM | COMPLETED)[name]
    batch, found = ours(rows, tokenizer)
    assert found == trls_sft(rows, tokenizer) and all(kept for _, kept in found)
    every = ours(rows, tokenizer, "trl_sft:completion_only_loss=false")[1]
    assert every == trls_sft(rows, tokenizer, completion_only_loss=False)
    assert (every == found) == (name in LM)
    assert batch.group_ids.tolist() == [0, 1] and batch.pair_ids is None


@pytest.mark.parametrize("name", ["messages", "chats"])
def test_where_only_the_assistants_tokens_count_they_are_those_that_the_template_marks(name):
    tokenizer, rows = words(MARKED), (LM | COMPLETED)[name]
    found = ours(rows, tokenizer, "trl_sft:assistant_only_loss=true")[1]
    assert found == trls_sft(rows, tokenizer, assistant_only_loss=True)
    assert (found == ours(rows, tokenizer)[1]) == (name == "chats")  # whose completion is the assistant's
    with refused("generation"):
        ours(rows, words(), "trl_sft:assistant_only_loss=true")


@pytest.mark.parametrize("template", [None, MARKED, THINKING], ids=["plain", "marked", "thinking"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_two_responses_with_the_ids_of_trls_dpo_trainer(name, template):
    tokenizer, rows = words(template), PAIRS[name]
    batch, found = ours(rows, tokenizer)
    assert found == trls_dpo(rows, tokenizer)
    assert batch.pair_ids.tolist() == [0, 0, 1, 1] == batch.group_ids.tolist()
    assert batch.chosen.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("template", [None, THINKING], ids=["plain", "thinking"])
@pytest.mark.parametrize("name", KTO)
def test_kto_rows_are_those_of_trls_kto_trainer(name, template):
    tokenizer, rows = words(template), KTO[name]
    batch, found = ours(rows, tokenizer, "trl_kto")
    labelled = [(*own, bool(label)) for own, label in zip(found, batch.chosen, strict=True)]
    assert sorted(labelled) == sorted(trls_kto(rows, tokenizer)) and batch.pair_ids is None


def test_a_completion_begins_where_its_ids_part_from_the_prompts():
    tokenizer = merging()
    for name, known, merged in (("completed", trls_sft, 1), ("pairs", trls_dpo, 2)):
        batch, found = ours(LETTERS[name], tokenizer)
        assert [int(note.split()[0]) for note in batch.notes if "another context" in note] == [merged]
        assert found == known(LETTERS[name], tokenizer)
        assert found[0] == ([1, 6, 7, 10, 5, 2], [3, 4, 5])  # "dea" + "bc" has one token for a and b
    assert found[1] == ([1, 6, 7, 3, 5, 3, 2], [3, 4, 5, 6])  # whose other side's prompt ends before a, too


def test_tools_and_the_templates_arguments_are_the_rows():
    tool = {"type": "function", "function": {"name": "w70", "description": "", "parameters": {"type": "object"}}}
    rows = [row | {"tools": json.dumps([tool]), "chat_template_kwargs": {"word": "w71"}} for row in COMPLETED["chats"]]
    found = ours(rows, words(TOLD))[1]
    assert found == trls_sft(rows, words(TOLD)) and all({70, 71} <= {*ids} for ids, _ in found)


def lost(batch: TokenBatch) -> int:
    """How many rows were left out."""
    return sum(int(note.split()[0]) for note in batch.notes if note.kind == "left-out")


@pytest.mark.parametrize("length", [2, 4, 6])
def test_sequences_are_cut_where_trl_cuts_them(length):
    tokenizer = words()
    for rows, known, kind in (
        (COMPLETED["chats"], trls_sft, "trl_sft"),
        (LM["messages"], trls_sft, "trl_sft"),
        (PAIRS["chats"], trls_dpo, "trl_preference"),
        (KTO["chats"], trls_kto, "trl_kto"),
    ):
        wanted = [own[:2] for own in known(rows, tokenizer, max_length=length)]
        asked = f"{kind}:max_length={length}"
        if not wanted:
            with refused("leaves no response"):
                ours(rows, tokenizer, asked)
            continue
        batch, found = ours(rows, tokenizer, asked)
        assert found == wanted
        cut = sum(int(note.split()[0]) for note in batch.notes if "cut at" in note)
        assert cut == sum(1 for ids, _ in ours(rows, tokenizer, kind)[1] if len(ids) > length) - lost(batch)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "split"])
@pytest.mark.parametrize("name", ["messages", "chats", "pairs"])
def test_a_file_is_read_as_datasets_writes_it(name, kind, tmp_path):
    rows = PAIRS["chats"] if name == "pairs" else (LM | COMPLETED)[name]
    data, path = datasets.Dataset.from_list(rows), tmp_path / f"data.{kind}"
    if kind == "jsonl":
        data.to_json(path)
    elif kind == "parquet":
        data.to_parquet(path)
    elif kind == "folder":
        data.save_to_disk(path, num_shards=2)
    else:
        datasets.DatasetDict({"test": data.select([0]), "train": data}).save_to_disk(path)
    dump, tokenizer = read_dump(path, policy_with(words())), words()
    wanted = trls_dpo(rows, tokenizer) if name == "pairs" else trls_sft(rows, tokenizer)
    found = [tuple(own.tolist() for own in dump.batch.sequence(row)) for row in range(len(dump.batch))]
    assert found == wanted
    loss = LossSettings.from_log(dump.loss)
    assert loss.weighting == ("dpo" if name == "pairs" else "sft") and loss.is_whole


def test_a_large_dataset_is_drawn_from_at_random_and_always_alike():
    rows = [{"text": f"w4 w{4 + n % 80} w{5 + n % 7}"} for n in range(300)]
    batch, found = ours(rows, words(), "trl_sft:rows=100")
    assert len(found) == 100 and found == ours(rows, words(), "trl_sft:rows=100")[1]
    every = ours(rows, words())[1]
    order = [every.index(own) for own in found[:60]]
    assert len({*order}) > 30 and max(order) > 100  # neither its beginning nor one row
    assert [int(note.split()[0]) for note in batch.notes if note.kind == "left-out"] == [200]


def test_which_dataset_it_is_tells_the_more_particular_set_of_columns_and_rollouts_are_none():
    policy = policy_with(words())
    given = {"prompt": "w4 ", "completion": "w5", "messages": CHATS[1], "chosen": "w5", "rejected": "w6", "label": True}
    sets = {
        "trl_preference": ("prompt", "chosen", "rejected", "messages"),
        "trl_kto": ("prompt", "completion", "label"),
        "trl_sft": ("prompt", "completion"),
    }
    for name, columns in sets.items():
        row = pd.DataFrame([{column: given[column] for column in columns}])
        assert read_rollouts(row, policy).notes[0].endswith(f"({name})")
    for others in ({"reward": 1.0}, {"advantage": 0.5}):
        with refused("completion"):
            read_rollouts([{"prompt": "w4 ", "completion": "w5"} | others], policy)
    native = read_rollouts([{"prompt": "w4 ", "completion": "w5", "response": "w7", "reward": 1.0}], policy)
    assert native.sequence(0)[0].tolist() == [4, 7] and native.rewards is not None


@pytest.mark.parametrize(
    ("rows", "format", "said"),
    [
        ([{"prompt": "w4", "completion": [answer("w5")]}], None, "strings and chats"),
        ([{"prompt": "w4", "chosen": "w5", "rejected": "w6"}, {"prompt": "w4", "chosen": "w5"}], None, "rejected"),
        ([{"messages": "w4 w5"}], "trl_sft:max_length=many", "max_length=1024"),
        ([{"messages": CHATS[0]}], "trl_sft:packing=true", "packing"),
        ([{"messages": CHATS[0]}], "trl_sft:assistant_only_loss=1", "assistant_only_loss=1"),
        ([{"messages": []}], None, "messages"),
        ([{"messages": CHATS[0], "tools": "{"}], None, "tools"),
        ([{"messages": CHATS[0], "images": ["a.png"]}], None, "image"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_in_one_line(rows, format, said):
    with refused(said):
        ours(rows, words(), format)
