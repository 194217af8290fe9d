"""Shards that verl and DeepSpeed wrote themselves (support/writers): weights and moments are what they had gathered.

fixtures/ holds what the writers wrote, and in it `whole.pt`, gathered by the writing processes. `make test-all` does
not run them: each has an environment of its own, which the head of its writer names.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from support.cli import assert_one_line, outcome_of, run
from support.refusals import refused

from gradscope.errors import InputError
from gradscope.policy import checkpoint_step, find_optimizer_file, load_policy, read_adamw_state, read_state

FIXTURES = Path(__file__).parent / "fixtures"
WRITTEN = sorted(path.name.removesuffix(".tar.xz") for path in FIXTURES.glob("*.tar.xz"))
STEPS = 2


@pytest.fixture
def unpack(tmp_path):
    """Unpack what a writer wrote."""

    def unpack(name: str) -> Path:
        with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path / name, filter="data")
        return tmp_path / name

    return unpack


def test_every_writer_has_left_something():
    kinds = {name.rpartition("-")[0] for name in WRITTEN}
    assert kinds == {
        *(f"verl-0.9.1-{way}" for way in ("fsdp", "fsdp-orig", "fsdp2")),
        *(f"deepspeed-0.19.8-zero{stage}" for stage in (1, 2, 3)),
    }


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_and_moments_are_those_that_the_writer_gathered(name, unpack):
    folder = unpack(name)
    whole = torch.load(folder / "whole.pt")
    model = folder / "global_step_2" if name.startswith("verl") else folder
    policy = load_policy(model)
    weights = dict(policy.model.named_parameters())
    assert all(torch.equal(weights[name], whole["weights"][name]) for name in weights)
    found = read_adamw_state(policy)
    assert (
        {own.betas[1] for own in found.settings.values()} == {0.98}
        and set(found.step.values()) == {STEPS}
        and checkpoint_step(model) == STEPS
    )
    assert found.exp_avg_sq.keys() == whole["exp_avg_sq"].keys() and len(found.exp_avg_sq) >= len(weights) - 1
    state = read_state(find_optimizer_file(model))
    names = [name for group in state["param_groups"] for name in group.get("param_names", ())] or list(weights)
    for number, name in enumerate(names):
        assert torch.equal(found.exp_avg_sq[name], whole["exp_avg_sq"][name]) and whole["exp_avg_sq"][name].any()
        assert torch.equal(state["state"][number]["exp_avg"], whole["exp_avg"][name])


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.proof),)


ZERO = {
    "zero1-3": ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"),
    "zero2-2": ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"),
    "zero3-3": ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
}


@pytest.mark.parametrize("stage", ZERO)
@pytest.mark.parametrize("how", ["missing", "cut short", "evil", "of another run"])
def test_deepspeeds_states_that_are_damaged_are_refused_by_name_and_none_is_run(stage, how, unpack, tmp_path):
    folder, proof = unpack(f"deepspeed-0.19.8-{stage}"), tmp_path / "it-ran"
    (folder / "zero_to_fp32.py").write_text(f"import os; os.mkdir({str(proof)!r})")
    for name in ZERO[stage]:
        file = folder / "global_step2" / name
        kept = file.read_bytes()
        if how == "missing":
            file.unlink()
        elif how == "cut short":
            file.write_bytes(kept[:3000])
        elif how == "evil":
            torch.save({"optimizer_state_dict": Evil(proof), "module": Evil(proof)}, file)
        else:
            torch.save({"optimizer_state_dict": {"partition_count": 7}, "module": {}}, file)
        with pytest.raises(InputError) as refused:
            load_policy(folder)
        assert "global_step2" in str(refused.value) and "\n" not in str(refused.value) and not proof.exists()
        file.write_bytes(kept)
    load_policy(folder)
    assert not proof.exists()


def test_states_of_a_model_that_is_split_over_ranks_are_refused(unpack):
    folder = unpack("deepspeed-0.19.8-zero2-2") / "global_step2"
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.rename(folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    with refused("mp_rank_01"):
        load_policy(folder.parent)


def test_the_states_are_those_that_latest_names_or_the_only_ones(unpack):
    folder = unpack("deepspeed-0.19.8-zero2-2")
    older = shutil.copytree(folder / "global_step2", folder / "global_step1")
    (older / "mp_rank_00_model_states.pt").write_bytes(b"")
    assert checkpoint_step(folder) == STEPS and load_policy(folder)
    (folder / "latest").write_text("global_step9")
    with refused("global_step9"):
        load_policy(folder)
    (folder / "latest").unlink()
    with refused():
        load_policy(folder)
    shutil.rmtree(older)
    assert checkpoint_step(folder) == STEPS and load_policy(folder)


def test_flat_moments_in_other_units_are_refused(unpack):
    folder = unpack("verl-0.9.1-fsdp-2") / "global_step_2" / "actor"
    for rank in range(2):
        file = folder / f"optim_world_size_2_rank_{rank}.pt"
        state = torch.load(file)
        state["state"][1] = {k: v[:-1] if v.dim() else v for k, v in state["state"][1].items()}
        torch.save(state, file)
    with refused("fsdp2"):
        read_adamw_state(load_policy(folder))


@pytest.mark.parametrize("name", ["verl-0.9.1-fsdp-2", "deepspeed-0.19.8-zero2-2"])
def test_commands_find_the_state_beside_the_shards(name, unpack, tmp_path, capsys):
    import pandas as pd

    folder = unpack(name)
    model = folder / "global_step_2" if name.startswith("verl") else folder
    rollouts = tmp_path / "rollouts.jsonl"
    rows = [{"prompt_ids": [4, 5], "response_ids": [6 + i, 7, 8], "reward": i % 2, "group": 0} for i in range(4)]
    rollouts.write_text("\n".join(map(json.dumps, rows)))
    run("measure", model, rollouts, "--out", tmp_path / "out", "--metric", "adamw", "--no-figures")
    table = pd.read_parquet(tmp_path / "out" / "tokens.parquet")
    assert table["param_grad_norm_adamw"].notna().all() and (table["param_grad_norm_adamw"] > 0).any()
    sorted(folder.rglob("*model*.pt"))[0].unlink()
    assert_one_line(outcome_of(capsys, "measure", model, rollouts, "--out", tmp_path / "again", "--no-figures"))
    assert not (tmp_path / "again").exists()
