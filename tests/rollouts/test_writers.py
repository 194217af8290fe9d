"""Logs that trainers' own code wrote (tests/support/writers), held against what the trainers then held in memory.

fixtures/ holds what it once wrote; `make test-all` has it write them again, each in an environment of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.policies import make_policy, make_tokenizer
from support.refusals import refused
from support.words import BOS, EOS, PAD
from support.writers.environments import python_with, write

from gradscope.objective import resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import read_dump

FIXTURES = Path(__file__).with_name("fixtures")
FLOAT32 = 4e-7
"""What float32 loses of a trainer's advantage of size 1: a few roundings of 6e-8."""


TORCH = "torch==2.13.0"
TRL_028 = ("trl==0.28.0", "transformers==4.57.6", TORCH, "pandas", "pyarrow", "rich")
TRL_19 = ("trl==1.9.2", "transformers==5.19.0", TORCH, "pandas", "pyarrow", "requests", "rich")
TRL_116 = ("trl==1.16.0", "transformers==5.19.0", TORCH, "rich")
VERL = ("verl==0.9.1", "TransferQueue==0.1.11", TORCH, "cachetools", "fastapi", "uvicorn")
MS_SWIFT = ("ms-swift==4.6.0", TORCH, "msgspec")
SKYRL = (
    *("skyrl==0.3.0", TORCH, "ray==2.56.0", "hydra-core==1.3.2", "skyrl-gym==0.4.0", "accelerate", "cloudpickle"),
    *("fastapi", "func_timeout", "jaxtyping", "loguru", "omegaconf", "polars", "s3fs", "tensorboard", "tensordict"),
    *("torchdata", "uvicorn", "wandb"),
)
TORCHTITAN = ("torchtitan==0.3.0", TORCH)
WRITERS = {
    "verl-0.9.1-v1": (VERL, "write_verl.py", "v1"),
    "verl-0.9.1-v0": (VERL, "write_verl.py", "v0"),
    "trl-0.28.0-text": (TRL_028, "write_trl.py", "text"),
    "trl-0.28.0-chat": (TRL_028, "write_trl.py", "chat"),
    "trl-1.9.2-chat": (TRL_19, "write_trl.py", "chat"),
    "trl-1.16.0-text": (TRL_116, "write_trl.py", "text"),
    "trl-1.16.0-chat": (TRL_116, "write_trl.py", "chat"),
    "trl-1.16.0-evaluated": (TRL_116, "write_trl.py", "evaluated"),
    "ms_swift-4.6.0-evaluated": (MS_SWIFT, "write_ms_swift.py", "evaluated"),
    "ms_swift-4.6.0-repeated": (MS_SWIFT, "write_ms_swift.py", "repeated"),
    "skyrl-0.3.0": (SKYRL, "write_skyrl.py"),
    "torchtitan-0.3.0-ids": (TORCHTITAN, "write_torchtitan.py", "ids"),
    "torchtitan-0.3.0-text": (TORCHTITAN, "write_torchtitan.py", "text"),
    "areal-1.0.4": (("areal==1.0.4", "--no-deps", "numpy", "aiofiles"), "write_areal.py"),
    "tinker-0.38.0": (("tinker==0.38.0",), "write_tinker.py"),
    "skyrl-0.1.0": (("skyrl==0.1.0", TORCH, "jaxtyping"), "write_first_skyrl.py"),
}
"""Packages, script and its argument."""


@pytest.fixture(params=["kept", pytest.param("written", marks=pytest.mark.all)])
def log_of(request, tmp_path) -> Callable[[str], Path]:
    """The folder of a log, by its name: as it is kept, or written anew."""

    def find(name: str) -> Path:
        if request.param == "kept":
            return FIXTURES / name
        packages, script, *kind = WRITERS[name]
        write(python_with(*packages), script, tmp_path / name, *kind)
        return tmp_path / name

    return find


def test_every_log_that_is_kept_has_its_writer():
    assert {path.name for path in FIXTURES.iterdir() if (path / "truth.json").exists()} == WRITERS.keys() - {
        "skyrl-0.1.0"
    }


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


def truth_of(log: Path) -> list[dict[str, Any]]:
    return json.loads((log / "truth.json").read_text())


def without_special(ids: list[int]) -> list[int]:
    return [i for i in ids if i not in (PAD, BOS, EOS)]


def found_in(dump: Any) -> list[dict[str, Any]]:
    """What was read of each response."""
    advantages = resolve_advantages(dump.batch)
    rows = []
    for row in range(len(dump.batch)):
        ids = dump.batch.sequence(row)[0]
        start = int(dump.batch.response_start[row] - dump.batch.attention_mask[row].int().argmax())
        rows.append(
            {
                "step": int(dump.steps[row]),
                "group": int(dump.batch.group_ids[row]),
                "prompt_ids": ids[:start].tolist(),
                "response_ids": ids[start:].tolist(),
                "advantage": float(advantages[row][dump.batch.response_mask[row]][0]),
            }
        )
    return rows


def partition(rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(key(row), []).append(place)
    return list(groups.values())


def check(found: list[dict[str, Any]], known: list[dict[str, Any]]) -> None:
    """The same responses in the same order, groups and advantages of these; text has lost the special tokens."""
    assert len(found) == len(known)
    for own, written in zip(found, known, strict=True):
        assert own["step"] == written["step"]
        assert own["response_ids"] == without_special(written["response_ids"])
        assert own["advantage"] == pytest.approx(written["advantage"], abs=FLOAT32, rel=FLOAT32)
    assert partition(found, lambda row: row["group"]) == partition(known, lambda row: row["group"])


@pytest.mark.parametrize("trainer", ["v1", "v0"])
def test_verls_groups_and_advantages_are_those_that_it_trained_with(policy, log_of, trainer):
    log = log_of(f"verl-0.9.1-{trainer}")
    known = truth_of(log)
    dump = read_dump(log, policy, format="verl")
    check(found_in(dump), [row for row in known if without_special(row["response_ids"])])
    assert len({row["group"] for row in known}) == 4 and all(row["prompt_ids"] for row in known)
    # One prompt has one response, whose raw score is its advantage; an empty response counted in its group's mean.
    assert any(row["advantage"] == pytest.approx(0.75, abs=1e-5) for row in found_in(dump))
    assert [note.kind for note in dump.notes if "groups hold one" in note] == ["groups-of-one"]
    left_out = [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"]
    assert sorted(left_out) == ([1, 6] if trainer == "v1" else [1])


TRL = ("0.28.0-text", "0.28.0-chat", "1.9.2-chat", "1.16.0-text", "1.16.0-chat", "1.16.0-evaluated")


@pytest.mark.parametrize("name", TRL)
def test_trls_completions_are_those_that_it_sampled_up_to_what_its_text_lost(policy, log_of, name):
    log = log_of(f"trl-{name}")
    known = truth_of(log)
    dump = read_dump(log / "completions", policy)
    assert dump.format == "trl"
    trained = [row for row in known if name != "1.16.0-evaluated" or row["step"] == 1]
    responses = [row | {"response_ids": row["completion_ids"]} for row in trained]
    responses = [row | {"group": (row["step"], str(row["prompt_ids"]))} for row in responses]
    kept = [row for row in responses if without_special(row["response_ids"])]
    found = found_in(dump)
    check(found, kept)
    left_out = sum(int(note.split()[0]) for note in dump.notes if note.kind == "left-out")
    assert left_out == len(known) - len(kept)
    # From 1.15 on a chat is logged as messages; before, as text without what makes it a chat.
    lost = name in ("0.28.0-chat", "1.9.2-chat")
    for own, written in zip(found, kept, strict=True):
        assert (own["prompt_ids"] == written["prompt_ids"]) != lost
        assert own["prompt_ids"] == (without_special(written["prompt_ids"]) if lost else written["prompt_ids"])
    doubted = [note for note in dump.notes if "marks are lost" in note]
    assert len(doubted) == (name != "1.16.0-chat")
    assert all(note.startswith(f"{len(kept)} of {len(kept)} responses") for note in doubted)
    assert any("vLLM" in note for note in dump.notes)


def test_a_step_that_trl_evaluated_is_not_taken_for_training(policy):
    # The file of step 2 holds the evaluation's prompts, sampled by the weights after the step.
    assert pq.read_table(next(FIXTURES.glob("trl-*evaluated/completions/*_00002*")))["prompt"][0].as_py() == "w70 w71"
    dump = read_dump(FIXTURES / "trl-1.16.0-evaluated" / "completions", policy)
    assert dump.steps.unique().tolist() == [1]
    with refused("4 of 4"):
        read_dump(FIXTURES / "trl-1.16.0-evaluated" / "completions", policy, step=2)


@pytest.mark.parametrize("given", [True, False], ids=["policy", "alone"])
def test_skyrls_batches_are_read_number_by_number(policy, log_of, given):
    log = log_of("skyrl-0.3.0")
    known = truth_of(log)
    dump = read_dump(log / "dumped_data", policy if given else None)
    assert dump.format == "skyrl"
    kept = [row for row in known if any(row["response_mask"])]
    found = found_in(dump)
    assert partition(found, lambda row: row["group"]) == partition(kept, lambda row: row["group"])
    for row, (own, written) in enumerate(zip(found, kept, strict=True)):
        assert {name: own[name] for name in ("step", "prompt_ids", "response_ids")} == {
            name: written[name] for name in ("step", "prompt_ids", "response_ids")
        }
        assert own["advantage"] == written["advantage"]
        start = int(dump.batch.response_start[row])
        columns = slice(start, start + len(written["response_ids"]))
        assert dump.batch.response_mask[row, columns].tolist() == [bool(one) for one in written["response_mask"]]
        for name in ("old_logprobs", "sampler_logprobs"):  # sums of powers of two, which bfloat16 holds exactly
            own = getattr(dump.batch, name)[row, columns].tolist()
            values = zip(own, written[name], written["response_mask"], strict=True)
            assert all(value == wanted for value, wanted, is_kept in values if is_kept)
    # One response was masked as a whole, and each step was filled up by two rows.
    assert sorted(int(note.split()[0]) for note in dump.notes if note.kind == "left-out") == [1, 4]
    assert any(note.kind == "certain-tokens" for note in dump.notes) == given  # the EOS that SkyRL put there


def test_a_batch_of_skyrls_first_version_is_read_too(log_of):
    dump = read_dump(log_of("skyrl-0.1.0") / "dumped_data" / "global_step_7_training_input.pkl")
    assert [row["prompt_ids"] + row["response_ids"] for row in found_in(dump)] == [[4, 5, 7, 8, 2], [4, 5, 6, 9, 2]]
    assert [row["advantage"] for row in found_in(dump)] == [0.5, -0.5]
    assert dump.batch.old_logprobs[dump.batch.response_mask].tolist() == [-0.5, -0.25, -1.0, -1.5, -0.75]
    assert dump.steps.tolist() == [7, 7] and dump.batch.group_ids.tolist() == [0, 1]


def test_torchtitans_sequences_are_those_that_its_sample_builder_makes(log_of):
    log = log_of("torchtitan-0.3.0-ids")
    dump = read_dump(log)
    assert dump.format == "torchtitan" and dump.first_step == 0
    known = {tuple(row["token_ids"]): row for row in truth_of(log)}
    groups: dict[int, set[int]] = {}
    for row in range(len(dump.batch)):
        ids, kept = (values.tolist() for values in dump.batch.sequence(row))
        written = known.pop(tuple(ids))
        sampled = [at for at, keep in enumerate(written["loss_mask"]) if keep]
        assert kept == sampled and int(dump.steps[row]) == written["step"]
        for name, own in (("advantages", "advantage"), ("old_logprobs", "logprobs")):
            found = getattr(dump.batch, name)[row, kept].tolist()
            assert found == pytest.approx([written[own][at] for at in sampled], abs=FLOAT32)
        groups.setdefault(int(dump.batch.group_ids[row]), set()).add(written["group"])
    # What is left of its samples is one token without a log-probability, which its loss drops.
    assert [row["logprobs"][-1] for row in known.values()] == [None]
    assert sorted(map(min, groups.values())) == [0, 1, 2, 3] and all(len(own) == 1 for own in groups.values())


def test_torchtitans_messages_are_read_where_the_recorder_kept_no_ids(policy, log_of):
    log = log_of("torchtitan-0.3.0-text")
    dump = read_dump(log, policy)
    wanted = []
    for row in truth_of(log):
        start = row["loss_mask"].index(True)
        if False not in row["loss_mask"][start:] and row["logprobs"][-1] is not None:  # of one turn, and not empty
            prompt, response = row["token_ids"][:start], without_special(row["token_ids"][start:])
            wanted.append((row["step"], [BOS, *prompt, BOS], response, np.float32(row["advantage"][-1])))
    found = [(r["step"], r["prompt_ids"], r["response_ids"], r["advantage"]) for r in found_in(dump)]
    assert sorted(found) == sorted(wanted) and len(wanted) == 10
    assert dump.batch.old_logprobs is None
    assert sorted(int(note.split()[0]) for note in dump.notes if note.kind == "left-out") == [1, 1, 3]


def test_areals_completions_are_those_that_it_sampled_where_its_split_tells_them(policy, log_of):
    log = log_of("areal-1.0.4")
    known = truth_of(log)
    dump = read_dump(log / "rollout", policy)
    assert dump.format == "areal" and dump.batch.old_logprobs is None
    # Nothing is logged of an empty response; a tool's output shifts the split.
    kept = [row for row in known if row["response_ids"] and 0 not in row["response_mask"]]
    found = found_in(dump)
    assert len(found) == len(kept) == len(known) - 2
    for own, written in zip(found, kept, strict=True):
        assert {name: own[name] for name in ("step", "prompt_ids", "response_ids")} == {
            name: written[name] for name in ("step", "prompt_ids", "response_ids")
        }
    assert partition(found, lambda row: row["group"]) == partition(kept, lambda row: row["group"])
    assert not any("another number" in note for note in dump.notes)


def test_tinkers_datums_are_native_rows_by_the_recipe_of_the_docs(log_of):
    log = log_of("tinker-0.38.0")
    known = truth_of(log)
    dump = read_dump(log)
    assert dump.format == "native"
    kept = [row for row in known if any(row["response_mask"])]
    found = found_in(dump)
    for row, (own, written) in enumerate(zip(found, kept, strict=True)):
        assert {name: own[name] for name in ("step", "prompt_ids", "response_ids")} == {
            name: written[name] for name in ("step", "prompt_ids", "response_ids")
        }
        assert own["advantage"] == pytest.approx(written["advantage"], abs=FLOAT32)
        start = int(dump.batch.response_start[row])
        columns = slice(start, start + len(written["response_ids"]))
        assert dump.batch.response_mask[row, columns].tolist() == [bool(one) for one in written["response_mask"]]
        assert dump.batch.old_logprobs[row, columns].tolist() == written["old_logprobs"]
    assert partition(found, lambda row: row["group"]) == partition(kept, lambda row: str(row["group"]))
    assert sum(int(note.split()[0]) for note in dump.notes if note.kind == "left-out") == len(known) - len(kept)


@pytest.mark.parametrize("name", ["evaluated", "repeated"])
def test_ms_swifts_completions_count_once_and_evaluations_do_not(policy, log_of, name):
    folder = log_of(f"ms_swift-4.6.0-{name}")
    known, log = truth_of(folder), folder / "completions.jsonl"
    dump = read_dump(log, policy)
    assert dump.format == "ms_swift"
    found = found_in(dump)
    for own, written in zip(found, known, strict=True):
        ids = written["response_ids"]
        assert own["response_ids"] == (
            ids[:-1] if ids[-1] == EOS else ids
        )  # its text holds special tokens but the last
        assert own["prompt_ids"] == written["prompt_ids"] and own["step"] == written["step"]
        assert own["advantage"] == pytest.approx(written["advantage"], abs=FLOAT32, rel=FLOAT32)
    assert partition(found, lambda row: row["group"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    lines = log.read_text().splitlines()
    assert len(lines) == (4 if name == "evaluated" else 5)  # the last one is written again when training ends
    assert sum(int(n.split()[0]) for n in dump.notes if n.kind == "left-out") == 4 * len(lines) - len(known)
