"""What a checkpoint lacks while it is written: every file that is missing or cut is found, in a whole one none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.adapters import save_adapter
from support.policies import make_model, make_tokenizer, save_checkpoint
from support.training import STEPS, train

from gradscope.policy import is_last_checkpoint, missing_part

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints in the ways of their writers."""
    out = tmp_path_factory.mktemp("saved")
    found = {"one file": save_checkpoint(out / "one", "qwen2"), "shards": out / "shards"}
    make_model("qwen2").save_pretrained(found["shards"], max_shard_size="20KB")
    assert len([*found["shards"].glob("model-*-of-*.safetensors")]) > 2
    found["torch"] = save_checkpoint(out / "torch", "qwen2")
    (found["torch"] / "model.safetensors").unlink()
    torch.save(make_model("qwen2").state_dict(), found["torch"] / "pytorch_model.bin")
    found["adapter"] = save_adapter(out / "adapter", found["one file"], r=2, target_modules=["q_proj"])
    train(make_model("qwen2"), out / "trainer")  # with optimizer.pt, training_args.bin, …
    found["trainer"] = out / "trainer" / f"checkpoint-{STEPS}"
    make_tokenizer().save_pretrained(found["trainer"])
    found["inside"] = out / "inside"
    shutil.copytree(found["one file"], found["inside"] / "actor" / "huggingface")
    return found


def damaged(folder: Path, to: Path) -> Iterator[tuple[str, Path]]:
    """Copies of a checkpoint, in each of which one file of weights or of an optimizer is missing, empty or cut."""
    for file in sorted(path for path in folder.rglob("*") if path.name.endswith(WEIGHTS)):
        content, name = file.read_bytes(), file.relative_to(folder)
        for length in (0, 4, len(content) // 2, len(content) - 2):
            copy = Path(shutil.copytree(folder, to / f"{file.name}-{length}"))
            (copy / name).write_bytes(content[:length])
            yield f"{name} of {length} bytes", copy
        # Of an optimizer's files nothing says that there will be one.
        if file.name.startswith(("model", "pytorch_model", "adapter_model")):
            copy = Path(shutil.copytree(folder, to / f"{file.name}-none"))
            (copy / name).unlink()
            yield f"no {name}", copy


@pytest.mark.parametrize("kind", ["one file", "shards", "torch", "adapter", "trainer", "inside"])
def test_every_file_that_is_missing_or_cut_is_found(kind, saved, tmp_path):
    assert missing_part(saved[kind]) is None
    cases = dict(damaged(saved[kind], tmp_path))
    assert len(cases) >= 5
    assert [name for name, folder in cases.items() if missing_part(folder) is None] == []


def test_a_folder_without_weights_yet_and_a_trainers_without_its_state_are_not_whole(saved, tmp_path):
    assert missing_part(tmp_path) == "weights"
    shutil.copy(saved["one file"] / "config.json", tmp_path)
    assert missing_part(tmp_path) == "weights"
    folder = Path(shutil.copytree(saved["trainer"], tmp_path / "checkpoint-3"))
    (folder / "trainer_state.json").unlink()
    assert missing_part(folder) == "trainer_state.json"
    (folder / "trainer_state.json").write_text('{"global_step": 3, "log_hist')
    assert "trainer_state.json" in missing_part(folder)


def test_old_formats_that_do_not_say_where_they_end_are_taken_as_they_are(saved, tmp_path):
    folder = Path(shutil.copytree(saved["one file"], tmp_path / "old"))
    (folder / "model.safetensors").unlink()
    kept = make_model("qwen2").state_dict()
    torch.save(kept, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert missing_part(folder) is None


def test_a_trainers_state_says_which_checkpoint_is_the_last(saved, tmp_path):
    assert is_last_checkpoint(saved["trainer"])  # of transformers' Trainer, which was to take so many steps
    assert not is_last_checkpoint(saved["one file"])
    for state, last in (
        ({"global_step": 2, "max_steps": 3}, False),
        ({"step": 3, "max_steps": 3}, True),
        ({"step": 3, "max_steps": None}, False),
        ({"global_step": 0, "max_steps": -1}, False),
        ({"global_step": "3", "max_steps": 3}, False),
    ):
        (tmp_path / "trainer_state.json").write_text(json.dumps(state))
        assert is_last_checkpoint(tmp_path) == last
