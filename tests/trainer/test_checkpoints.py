"""Checkpoints: written whole or not at all, loadable by transformers, exact to go on from."""

from __future__ import annotations

import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.policies import save_checkpoint as save_tiny
from support.refusals import refused
from support.tiers import every
from support.training import make_learner, make_steps
from transformers import AutoModelForCausalLM

from gradscope import load_policy
from gradscope.policy import AdamWState
from gradscope.trainer import TrainConfig, checkpoints, list_checkpoints
from gradscope.trainer.checkpoints import drop_old, newest_whole, restore_checkpoint, save_checkpoint
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
    for part in make_steps(learner.policy, size=3):
        learner.updater.step(part, LOSS)
    return learner


@pytest.mark.parametrize("name", every(3, ["qwen2", "llama", "gpt2", "gemma2", "mixtral"]))
def test_transformers_loads_the_trained_weights_tied_or_not(name, tmp_path):
    learner = make_learner(save_tiny(tmp_path / "model", name))
    learner.updater.step(make_steps(learner.policy)[0], LOSS)
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
    assert (ours.step, ours.settings) == (wanted.step, wanted.settings)
    assert set(ours.step.values()) == {2}
    assert "random_states.pt" in {p.name for p in saved.iterdir()}


def test_a_learner_goes_on_from_a_checkpoint_to_the_same_numbers(folder, tmp_path):
    first = make_learner(folder, kl_coef=0.1)
    steps = make_steps(first.policy, size=3)
    first.updater.step(steps[0], LOSS)
    second = make_learner(folder, save_checkpoint(tmp_path, 1, first), kl_coef=0.1)
    restore_checkpoint(tmp_path / "checkpoints/step-000001", second)
    assert torch.equal(first.reference_logprobs(steps[1].batch), second.reference_logprobs(steps[1].batch))
    results = [learner.updater.step(steps[1], LOSS) for learner in (first, second)]
    assert results[0] == results[1]
    again = dict(second.policy.model.named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in first.policy.model.named_parameters())


def damage(file: Path, how: str) -> None:
    """What crashes, full disks and other programs leave of a file."""
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "cut": file.read_bytes()[:-20]}[how])


DAMAGED = [(file, how) for file in ("optimizer.pt", "trainer_state.json") for how in ("missing", "empty", "cut")]


@pytest.mark.parametrize(("name", "how"), [*DAMAGED, ("random_states.pt", "empty"), ("model.safetensors", "cut")])
def test_the_newest_checkpoint_that_can_be_read_is_gone_on_from(name, how, trained, tmp_path, capsys):
    saved = [save_checkpoint(tmp_path, step, trained) for step in (1, 2, 3)]
    assert newest_whole(tmp_path) == saved[2]
    damage(saved[2] / name, how)
    assert newest_whole(tmp_path) == saved[1]
    assert str(saved[2]) in capsys.readouterr().err


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
    with refused("lora_rank"):
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
    drop_old(tmp_path, None)
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
    drop_old(tmp_path, None)
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
            with pytest.raises(OSError):
                save_checkpoint(tmp_path, 2, trained, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    restore_checkpoint(tmp_path / "checkpoints/step-000001", trained)
