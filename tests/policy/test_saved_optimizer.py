"""The optimizer's state beside a checkpoint: each moment comes back under the name of its parameter, nothing runs."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.policies import make_batch, make_model, save_checkpoint
from support.refusals import refused
from support.training import STEPS, train
from torch import Tensor, nn

from gradscope import StepSettings, apply_update, interval_gradients
from gradscope.errors import InputError
from gradscope.policy import (
    AdamWSettings,
    AdamWState,
    Policy,
    find_blocks,
    find_optimizer_file,
    load_policy,
    read_adamw_state,
    read_state,
)
from gradscope.policy.adamw import optimizer_names


@pytest.fixture(scope="module", params=["qwen2", "gpt2"])
def run(request, tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of a whole model (tied head, biases, norms) and what the optimizer remembered."""
    out = tmp_path_factory.mktemp("run")
    live = train(make_model(request.param), out)
    return out / f"checkpoint-{STEPS}", live


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    peft = pytest.importorskip("peft")
    out = tmp_path_factory.mktemp("adapters")
    base = save_checkpoint(out / "base", "qwen2")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], bias="lora_only", modules_to_save=["norm"])
    live = train(peft.get_peft_model(load_policy(base).model, settings), out / "run")
    return out / "run" / f"checkpoint-{STEPS}", {n.removeprefix("base_model.model."): v for n, v in live.items()}


def check_equal(found: AdamWState, live: dict[str, Tensor]) -> None:
    assert found.exp_avg_sq.keys() == live.keys()
    for name, moment in live.items():
        assert torch.equal(found.exp_avg_sq[name], moment), name
        assert moment.any()
    assert set(found.step.values()) == {STEPS}


def test_the_moments_of_transformers_trainer_come_back_by_name(run):
    folder, live = run
    found = read_adamw_state(load_policy(folder), max_grad_norm=1.0)
    check_equal(found, live)
    assert {(own.betas, own.eps) for own in found.settings.values()} == {((0.9, 0.999), 1e-8)}
    assert found.max_grad_norm == 1.0
    groups = read_state(folder / "optimizer.pt")["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]  # in two groups, which are not in model order
    names = optimizer_names(load_policy(folder).model, read_state(folder / "optimizer.pt"))
    assert sorted(names) == sorted(live) and names != list(live)


def test_the_moments_stay_in_the_file_and_nothing_writes_there(run, tmp_path):
    folder, live = run
    file = Path(shutil.copy(folder / "optimizer.pt", tmp_path))
    written = file.read_bytes()
    state, policy = read_state(file), load_policy(folder)
    if (maps := Path("/proc/self/maps")).exists():
        assert str(file) in maps.read_text()
    found = AdamWState.from_state_dict(policy.model, state)
    places = {moments["exp_avg_sq"].data_ptr() for moments in state["state"].values()}
    assert {moment.data_ptr() for moment in found.exp_avg_sq.values()} == places  # no copy
    apply_update(policy, make_batch(policy), step=StepSettings("adamw", 1e-2), optimizer_state=state)
    check_equal(found, live)
    state["state"][0]["exp_avg_sq"].add_(1.0)
    assert file.read_bytes() == written


def test_torchs_old_format_which_cannot_be_mapped_is_read_as_well(run, tmp_path):
    folder, live = run
    state = torch.load(folder / "optimizer.pt")
    torch.save(state, tmp_path / "optimizer.pt", _use_new_zipfile_serialization=False)
    check_equal(read_adamw_state(load_policy(folder), tmp_path), live)


def test_the_moments_of_an_adapter_come_back_under_its_names(adapter_run):
    folder, live = adapter_run
    check_equal(read_adamw_state(load_policy(folder, params="adapter")), live)
    assert any("lora_B" in name for name in live) and any(name.endswith("bias") for name in live)


def test_updates_go_on_from_the_trainers_state(run):
    # By hand: AdamW over the two groups, as the Trainer makes them, one step further; decay off in both.
    folder, _ = run
    policy = load_policy(folder)
    batch, state = make_batch(policy), read_state(folder / "optimizer.pt")
    step = StepSettings("adamw", 1e-3, 0.0, max_grad_norm=None)
    moved = apply_update(policy, batch, step=step, optimizer_state=state)
    again = copy.deepcopy(policy.model)
    names = optimizer_names(policy.model, state)
    parameters = [dict(again.named_parameters())[name] for name in names]
    sizes = [len(group["params"]) for group in state["param_groups"]]
    optimizer = torch.optim.AdamW([{"params": part} for part in _split(parameters, sizes)], lr=1e-3)
    given = copy.deepcopy(state)
    for group in given["param_groups"]:
        group |= {"lr": 1e-3, "weight_decay": 0.0}
    optimizer.load_state_dict(given)
    before = [p.detach().clone() for p in parameters]
    from gradscope.objective import PAPER, batch_loss, loss_logprobs

    loss = batch_loss(loss_logprobs(again, moved.batch), moved.batch, PAPER, num_tokens=batch.num_tokens)
    loss.backward()
    optimizer.step()
    square = sum((p - old).double().square().sum() for p, old in zip(parameters, before, strict=True))
    assert moved.update_norm == pytest.approx(square.sqrt().item(), rel=1e-4)


def _split(items: list[Any], sizes: list[int]) -> list[list[Any]]:
    return [items[: sizes[0]], items[sizes[0] :]]


def test_interval_gradients_are_in_the_metric_of_the_saved_state(run):
    folder, live = run
    policy = load_policy(folder)
    found = interval_gradients(policy, make_batch(policy), optimizer_state=read_adamw_state(policy)).adamw_table
    by_hand = AdamWState(live, dict.fromkeys(live, STEPS), dict.fromkeys(live, AdamWSettings()))
    expected = interval_gradients(policy, make_batch(policy), optimizer_state=by_hand).adamw_table
    assert found["norm"].tolist() == expected["norm"].tolist() and found["norm"].iloc[-1] > 0


def test_without_a_file_there_is_no_state_and_a_path_must_hold_one(run, tmp_path):
    folder, live = run
    bare = Path(shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("optimizer.pt")))
    policy = load_policy(bare)
    assert read_adamw_state(policy) is None
    assert read_adamw_state(Policy(policy.model, None, find_blocks(policy.model))) is None  # made in memory
    check_equal(read_adamw_state(policy, folder), live)
    check_equal(read_adamw_state(policy, folder / "optimizer.pt"), live)
    with refused("optimizer.pt"):
        read_adamw_state(policy, tmp_path)
    (bare / "adapter").mkdir()
    shutil.copy(folder / "optimizer.pt", bare)
    assert find_optimizer_file(bare / "adapter") == bare / "optimizer.pt"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def refusal(path: Path, state: Any) -> str:
    torch.save(state, path)
    with pytest.raises(InputError) as caught:
        read_state(path)
    return str(caught.value)


def test_other_optimizers_and_pickles_are_refused_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "optimizer.pt"
    said = refusal(path, {"state": Evil(), "param_groups": []})
    assert "nothing in it was run" in said and "weights_only" not in said  # no advice to run it
    assert not Path("ran").exists()
    model = nn.Linear(2, 2)
    for make in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adamax):
        optimizer = make(model.parameters(), lr=1e-3)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert "the optimizer state is not AdamW's" in refusal(path, optimizer.state_dict())
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    optimizer.step()
    assert "holds mu_product, which AdamW does not have" in refusal(path, optimizer.state_dict())
    eight_bit = {"state": {0: {"step": 3, "state1": torch.zeros(4, dtype=torch.uint8), "qmap1": torch.zeros(256)}}}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0]}
    assert "the optimizer state is not AdamW's" in refusal(path, eight_bit | {"param_groups": [group]})
    path.write_bytes(b"PK\x03\x04 cut off")
    with refused():
        read_state(path)


def test_groups_of_other_sizes_are_refused_with_both(run):
    folder, _ = run
    policy = load_policy(folder)
    state = read_state(folder / "optimizer.pt")
    moved = state["param_groups"][0]["params"].pop()
    state["param_groups"][1]["params"].insert(0, moved)
    with refused():
        AdamWState.from_state_dict(policy.model, state)


def test_moments_that_are_packed_in_few_bits_are_not_adamws(tmp_path):
    """torchao's 8-bit AdamW saves them as tensors of its own; a policy's folder with them is read without them."""
    torchao = pytest.importorskip("torchao.optim")
    model = torch.nn.Linear(64, 64)
    optimizer = torchao.AdamW8bit(model.parameters(), lr=1e-3, block_size=16)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with refused("packed"):
        read_state(tmp_path / "optimizer.pt")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_moments_in_few_bits_are_refused(tmp_path, dtype):
    moments = torch.ones(4, 4)
    state = {"step": torch.tensor(3.0), "exp_avg": moments, "exp_avg_sq": moments.to(dtype)}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    torch.save({"state": {0: state}, "param_groups": [group]}, tmp_path / "optimizer.pt")
    with refused("packed"):
        read_state(tmp_path / "optimizer.pt")
