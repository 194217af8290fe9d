"""Checkpoints: written whole or not at all, loadable by transformers, exact to go on from, refused in good time."""

from __future__ import annotations

import errno
import random
import resource
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.policies import save_checkpoint as save_tiny
from support.tiers import every
from support.training import make_learner, make_passes
from transformers import AutoModelForCausalLM

from gradscope import load_policy
from gradscope.cli import main
from gradscope.errors import InputError
from gradscope.policy import AdamWState
from gradscope.trainer import TrainConfig, checkpoints, list_checkpoints
from gradscope.trainer.checkpoints import check_space, restore_checkpoint, save_checkpoint
from gradscope.trainer.learner import Learner

LOSS = TrainConfig().loss


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny checkpoint with a tokenizer; its embeddings are tied."""
    return save_tiny(tmp_path_factory.mktemp("model") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def trained(folder) -> Learner:
    """A learner after two steps."""
    learner = make_learner(folder)
    for part in make_passes(learner.policy, size=3):
        learner.updater.step(part, LOSS)
    return learner


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "gemma2", "mixtral"])
def test_transformers_loads_the_trained_weights_tied_or_not(name, tmp_path):
    learner = make_learner(save_tiny(tmp_path / "model", name))
    learner.updater.step(make_passes(learner.policy)[0], LOSS)
    saved = save_checkpoint(tmp_path, 1, learner)
    model, told = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    before = dict(load_policy(tmp_path / "model").model.named_parameters())
    wanted = dict(learner.policy.model.named_parameters())
    assert dict(model.named_parameters()).keys() == wanted.keys()
    for parameter, value in model.named_parameters():
        assert torch.equal(value, wanted[parameter]), parameter
        assert not torch.equal(value, before[parameter]), parameter
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (name in ("qwen2", "gpt2", "gemma2"))
    assert load_policy(saved).tokenizer("w5 w6").input_ids == [5, 6]


def test_buffers_that_a_model_cannot_do_without_are_saved(trained, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    norm = trained.policy.model.model.norm
    monkeypatch.setitem(norm._buffers, "kept", torch.arange(3.0))
    monkeypatch.setitem(norm._buffers, "left_out", torch.arange(3.0))
    norm._non_persistent_buffers_set.add("left_out")
    saved = load_file(save_checkpoint(tmp_path, 1, trained) / "model.safetensors")
    norm._non_persistent_buffers_set.discard("left_out")
    assert torch.equal(saved["model.norm.kept"], torch.arange(3.0))
    assert "model.norm.left_out" not in saved


def test_the_state_of_adamw_is_the_optimizers_own(trained, tmp_path):
    saved = save_checkpoint(tmp_path, 2, trained)
    state = torch.load(saved / "optimizer.pt")
    ours = AdamWState.from_state_dict(load_policy(saved).model, state, max_grad_norm=1.0)
    wanted = AdamWState.from_state_dict(trained.policy.model, trained.optimizer.state_dict(), max_grad_norm=1.0)
    assert ours.exp_avg_sq.keys() == wanted.exp_avg_sq.keys()
    assert all(torch.equal(ours.exp_avg_sq[name], v) for name, v in wanted.exp_avg_sq.items())
    assert (ours.step, ours.beta2, ours.eps) == (wanted.step, wanted.beta2, wanted.eps)
    assert set(ours.step.values()) == {2}
    assert "random_states.pt" in {p.name for p in saved.iterdir()}


def test_a_learner_goes_on_from_a_checkpoint_to_the_same_numbers(folder, tmp_path):
    first = make_learner(folder, kl_coef=0.1)
    passes = make_passes(first.policy, size=3)
    first.updater.step(passes[0], LOSS)
    second = make_learner(folder, save_checkpoint(tmp_path, 1, first), kl_coef=0.1)
    restore_checkpoint(tmp_path / "checkpoints/step-000001", second)
    assert torch.equal(first.reference_logprobs(passes[1].batch), second.reference_logprobs(passes[1].batch))
    results = [learner.updater.step(passes[1], LOSS) for learner in (first, second)]
    assert results[0] == results[1]
    again = dict(second.policy.model.named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in first.policy.model.named_parameters())


DAMAGED = ("optimizer.pt", "random_states.pt", "trainer_state.json")


def damage(file: Path, how: str) -> None:
    """What crashes, full disks and other programs leave of a file."""
    if how == "missing":
        file.unlink()
    elif how == "foreign":
        torch.save({"a": torch.zeros(3)}, file)
    else:
        file.write_bytes({"empty": b"", "a number": b"5", "cut": file.read_bytes()[:-20]}[how])


@pytest.mark.parametrize("how", every(2, ["missing", "empty", "cut", "foreign", "a number"]))
@pytest.mark.parametrize("name", [*DAMAGED, "adapter/adapter_config.json", "adapter/adapter_model.safetensors"])
def test_a_damaged_checkpoint_is_refused_in_one_line_that_names_it(name, how, folder, tmp_path):
    settings = {"lora_rank": 2} if name.startswith("adapter") else {}
    first = make_learner(folder, **settings)
    first.updater.step(make_passes(first.policy)[0], LOSS)
    saved = save_checkpoint(tmp_path, 1, first)
    damage(saved / name, how)
    with pytest.raises(InputError, match=r"step-000001 is damaged \(.+\); delete it to go on from the one before") as e:
        restore_checkpoint(saved, make_learner(folder, saved, **settings))
    assert "\n" not in str(e.value)


def test_what_belongs_to_another_checkpoint_is_damage(trained, folder, tmp_path):
    saved = save_checkpoint(tmp_path, 1, trained)
    state = torch.load(saved / "optimizer.pt")
    state["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(state, saved / "optimizer.pt")
    with pytest.raises(InputError, match=r"damaged .*moment of shape"):
        restore_checkpoint(saved, trained)
    other = save_checkpoint(tmp_path, 2, trained)
    torch.save([], other / "random_states.pt")
    with pytest.raises(InputError, match=r"damaged .*holds none"):
        restore_checkpoint(other, trained)
    shutil.copy(saved / "trainer_state.json", other / "trainer_state.json")
    with pytest.raises(InputError, match=r"damaged .*is of step 1"):
        restore_checkpoint(other, trained)


FILES = ("model.safetensors", "config.json", "tokenizer.json", "optimizer.pt", "random_states.pt")


@pytest.mark.parametrize("name", [*FILES, "adapter/adapter_model.safetensors", "adapter/adapter_config.json"])
def test_a_flipped_bit_is_damage(name, folder, tmp_path):
    learner = make_learner(folder, **({"lora_rank": 2} if name.startswith("adapter") else {}))
    learner.updater.step(make_passes(learner.policy)[0], LOSS)
    saved = save_checkpoint(tmp_path, 1, learner)
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(InputError, match=r"step-000001 is damaged \(.+ was changed"):
        restore_checkpoint(saved, learner)


def test_a_checkpoint_without_hashes_of_an_earlier_version_is_gone_on_from(trained, tmp_path):
    saved = save_checkpoint(tmp_path, 1, trained)
    (saved / "trainer_state.json").write_text('{"step": 1, "nonfinite_in_a_row": 2}')
    assert restore_checkpoint(saved, trained) == 2


def test_weights_are_finite_until_one_entry_is_not(folder):
    learner = make_learner(folder)
    entry = list(learner.policy.model.parameters())[-1].data.view(-1)
    for value in (0.0, 3e38):  # the sum of squares would be infinite
        entry[-1] = value
        assert learner.is_finite()
    for value in (float("inf"), float("-inf"), float("nan")):
        entry[-1] = value
        assert not learner.is_finite()


def test_adapters_of_a_rank_above_the_width_are_refused(folder):
    width = load_policy(folder).config.hidden_size
    assert make_learner(folder, lora_rank=width).adapters is not None
    with pytest.raises(InputError, match=f"lora_rank is {width + 1} and the policy is {width} wide"):
        make_learner(folder, lora_rank=width + 1)


def test_random_numbers_go_on_where_they_were(trained, tmp_path):
    def draw() -> tuple:
        # An odd count: numpy and torch keep the second of a pair of normal numbers for later.
        return random.random(), np.random.randn(3).tolist(), torch.randn(3).tolist()

    draw()
    saved = save_checkpoint(tmp_path, 1, trained)
    wanted = [draw() for _ in range(2)]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    restore_checkpoint(saved, trained)
    assert [draw() for _ in range(2)] == wanted


def test_only_the_newest_are_kept(trained, tmp_path):
    for step in (1, 2, 999_999, 1_000_000):  # past six digits, the order of names is not that of steps
        save_checkpoint(tmp_path, step, trained, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-1000000", "step-999999"]


def test_killed_while_an_old_one_is_deleted_nothing_is_left_of_it_under_its_name(trained, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, trained)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", lambda *_: (_ for _ in ()).throw(SystemExit("killed")))
        with pytest.raises(SystemExit):
            save_checkpoint(tmp_path, 2, trained, keep=1)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000002"]
    check_space(tmp_path, trained, 1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_a_crash_while_writing_leaves_no_checkpoint_and_is_cleaned_up_after(trained, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, trained)
    left, seen = tmp_path / "checkpoints/.step-000002.partial", tmp_path / "seen"

    def crash(*_):
        shutil.copytree(left, seen)  # what a kill leaves on the disk at this moment
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_json", crash)  # the last file but for the renaming
        with pytest.raises(SystemExit):
            save_checkpoint(tmp_path, 2, trained)
    assert (seen / "model.safetensors").is_file()
    for step in (2, 3):
        shutil.copytree(seen, left.with_name(f".step-{step:06d}.partial"))
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000001"]
    check_space(tmp_path, trained, 1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    shutil.copytree(tmp_path / "checkpoints/step-000001", left)
    save_checkpoint(tmp_path, 3, trained)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000003"]


def test_a_disk_that_fills_up_while_writing_is_one_line_and_keeps_what_there_was(trained, tmp_path):
    save_checkpoint(tmp_path, 1, trained)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (50_000, 150_000):  # weights take 110 kB, the optimizer's state 245 kB
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=r"step-000002 could not be written .*; the checkpoints before it stay"):
                save_checkpoint(tmp_path, 2, trained, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    restore_checkpoint(tmp_path / "checkpoints/step-000001", trained)


def test_a_disk_without_room_for_the_checkpoints_of_the_run_is_told_at_once(trained, tmp_path, monkeypatch):
    size = sum(f.stat().st_size for f in save_checkpoint(tmp_path / "one", 1, trained).iterdir())
    # What is asked for is what a checkpoint takes, but for tokenizer and random states.
    parameters = sum(p.numel() for p in trained.policy.model.parameters())
    assert 0.8 < 3 * 4 * parameters / size < 1

    def room(count: float) -> None:
        free = int(count * 3 * 4 * parameters)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    room(2.001)
    check_space(tmp_path / "run", trained, 2)
    with pytest.raises(OSError, match="3 checkpoints take") as raised:
        check_space(tmp_path / "run", trained, 3)
    assert not isinstance(raised.value, InputError)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_locked_folder_is_the_users_fault_and_a_full_disk_is_not(code, trained, tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(code, "no")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(OSError if code == errno.ENOSPC else InputError) as raised:
        check_space(tmp_path / "run", trained, 1)
    assert isinstance(raised.value, InputError) == (code != errno.ENOSPC)


def test_a_full_disk_ends_the_command_with_1_and_a_blocked_folder_with_2_before_any_step(tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "checkpoints").write_text("")
    command = ["train", "--steps", "40", "--trackers", "--out"]
    with pytest.raises(SystemExit) as stopped:
        main([*command, str(blocked)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(SystemExit) as stopped:
        main([*command, str(tmp_path / "run")])
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert "2 checkpoints take 0.02" in error and error.count("\n") == 1
    assert not (tmp_path / "run/metrics.jsonl").exists()
