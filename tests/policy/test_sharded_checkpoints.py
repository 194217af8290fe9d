"""Checkpoints in shards are the model and the moments that were saved, bit for bit, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.policies import save_checkpoint
from support.processes import launch
from support.refusals import refused
from support.shard_writers import MODEL, STEPS

from gradscope.errors import InputError
from gradscope.policy import (
    Policy,
    checkpoint_step,
    find_optimizer_file,
    load_policy,
    missing_part,
    policy_hashes,
    read_adamw_state,
    read_state,
)

LAYOUTS = {
    "plain": ("plain", None),
    "an optimizer's own numbers": ("numbered", None),
    "copies, and cut along other dimensions": ("hybrid", None),
    "prime-rl": ("prime/step_2", 2),
    "prime-rl, the part itself": ("prime/step_2/trainer", 2),
    "torchtitan": ("titan/step-2", 2),
    "nemo-rl": ("nemo/step_2", 2),
    "nemo-rl, the weights": ("nemo/step_2/policy/weights", 2),
    "accelerate": ("accelerate/checkpoint-2", 2),
    "accelerate, FSDP 1": ("accelerate/checkpoint-1", 1),
    "accelerate, the weights": ("accelerate/checkpoint-2/pytorch_model_fsdp_0", 2),
    "accelerate, a file per rank": ("accelerate/ranks", None),
    "accelerate, whole": ("accelerate/full", None),
    "a file per rank, as verl's": ("verl/global_step_2", 2),
    "a file per rank, the configuration": ("verl/global_step_2/actor/huggingface", 2),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """What two processes under FSDP saved (shard_writers.py)."""
    out = tmp_path_factory.mktemp("shards")
    for ended in launch(Path(__file__).parents[1] / "support" / "shard_writers.py", out):
        assert ended.status == 0, ended.stderr
    return out


@pytest.fixture
def whole(written) -> dict[str, Any]:
    return torch.load(written / "whole.pt")


def check_whole(policy: Policy, whole: dict[str, Any]) -> None:
    """The weights are those that were gathered, and so are the moments that are found by themselves."""
    weights = dict(policy.model.named_parameters())
    assert weights and all(torch.equal(weights[name], whole["model"][name]) for name in weights)
    kept, found = whole["optimizer"]["state"], read_adamw_state(policy)
    assert found.exp_avg_sq.keys() == weights.keys() == kept.keys()
    state = read_state(find_optimizer_file(policy.path))
    by_shape = {id(entry["exp_avg_sq"]): entry for entry in state["state"].values()}
    assert len(by_shape) == len(weights)
    for name, entry in kept.items():
        assert torch.equal(found.exp_avg_sq[name], entry["exp_avg_sq"]) and entry["exp_avg_sq"].any(), name
        assert found.step[name] == int(entry["step"]) == STEPS
        assert any(torch.equal(other["exp_avg"], entry["exp_avg"]) for other in by_shape.values()), name
    assert {(own.betas[1], own.eps) for own in found.settings.values()} == {(0.98, 1e-8)}
    assert sorted(group["weight_decay"] for group in state["param_groups"]) == [0.0, 0.1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_moments_of_each_layout_are_those_that_were_gathered(layout, written, whole, tmp_path):
    place, step = LAYOUTS[layout]
    folder = shutil.copytree(written / place.split("/")[0], tmp_path / place.split("/")[0]).parent / place
    if "huggingface" in place:
        folder.mkdir()
        shutil.copy(written / "config.json", folder)
    policy = load_policy(folder, base=None if "huggingface" in place else written)
    check_whole(policy, whole)
    assert checkpoint_step(folder) == step


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("place", ["plain", "accelerate/checkpoint-2/pytorch_model_fsdp_0"])
def test_pytorchs_own_reader_finds_the_same_weights(place, written):
    import torch.distributed.checkpoint as dcp

    model = load_policy(written / place, base=written).model
    wanted = {"model": {name: torch.zeros_like(p) for name, p in model.named_parameters()}}
    dcp.load(wanted, checkpoint_id=written / place, no_dist=True)
    assert all(torch.equal(p, wanted["model"][name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("home", ["", "..", "huggingface", "run"])
def test_the_configuration_is_found_beside_and_around_the_shards(home, written, tmp_path):
    actor = tmp_path / "run" / "global_step_2" / "actor"
    shutil.copytree(written / "verl" / "global_step_2" / "actor", actor)
    place = {"run": tmp_path / "run"}.get(home, actor / home)
    place.mkdir(exist_ok=True)
    with refused("--base"):
        load_policy(actor.parent)
    shutil.copy(written / "config.json", place)
    alone, named = load_policy(actor.parent), load_policy(actor.parent, base=written)
    assert policy_hashes(alone) == policy_hashes(named)
    assert Path(alone.configured_by or alone.path).samefile(place) and Path(named.configured_by).samefile(written)


def test_the_hash_of_the_weights_is_of_every_shard(written, tmp_path):
    folder = shutil.copytree(written / "plain", tmp_path / "plain")
    before = policy_hashes(load_policy(folder, base=written))["model"]
    piece = folder / "__1_0.distcp"
    data = bytearray(piece.read_bytes())
    data[-1] ^= 1
    policy = load_policy(folder, base=written)
    piece.write_bytes(data)
    assert policy_hashes(policy)["model"] != before


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.proof),)


def edit(plain: Path, change: Callable[[Any], None]) -> None:
    """Change a checkpoint's metadata."""
    meta = pickle.loads((plain / ".metadata").read_bytes())
    change(meta)
    (plain / ".metadata").write_bytes(pickle.dumps(meta))


def forget_a_piece(meta: Any) -> None:
    place = next(index for index in meta.storage_data if index.fqn == "model.model.norm.weight")
    del meta.storage_data[place]


def lead_elsewhere(meta: Any) -> None:
    for info in meta.storage_data.values():
        info.relative_path = f"../plain/{info.relative_path}"


def say_one_process(ranks: Path) -> None:
    (ranks / "model_world_size_2_rank_1.pt").unlink()
    (ranks / "model_world_size_2_rank_0.pt").rename(ranks / "model_world_size_1_rank_0.pt")


def cut(file: Path, end: int) -> None:
    file.write_bytes(file.read_bytes()[:end])


RANK = "model_world_size_2_rank_{}.pt"
OF_PIECES = {
    "a piece is missing": (lambda d, _: (d / "__1_0.distcp").unlink(), "__1_0.distcp"),
    "a piece is cut short": (lambda d, _: cut(d / "__1_0.distcp", 9000), "__1_0.distcp"),
    "pieces are exchanged": (lambda d, _: shutil.copy(d / "__0_0.distcp", d / "__1_0.distcp"), "__1_0.distcp"),
    "the metadata are missing": (lambda d, _: (d / ".metadata").unlink(), ".metadata"),
    "the metadata are cut short": (lambda d, _: cut(d / ".metadata", -100), ".metadata"),
    "the metadata run something": (
        lambda d, proof: (d / ".metadata").write_bytes(pickle.dumps(Evil(proof))),
        ".metadata",
    ),
    "the metadata hold something that runs": (
        lambda d, proof: edit(d, lambda meta: setattr(meta, "planner_data", Evil(proof))),
        ".metadata",
    ),
    "the metadata lack a piece": (lambda d, _: edit(d, forget_a_piece), "model.norm.weight"),
    "the metadata lead elsewhere": (lambda d, _: edit(d, lead_elsewhere), ".metadata"),
}
OF_RANKS = {
    "a rank is missing": (lambda d, _: (d / RANK.format(1)).unlink(), "rank 1 of 2"),
    "a rank is cut short": (lambda d, _: cut(d / RANK.format(1), 5000), RANK.format(1)),
    "a rank runs something": (lambda d, proof: torch.save({"a": Evil(proof)}, d / RANK.format(1)), RANK.format(1)),
    "two saves are mixed": (
        lambda d, _: shutil.copy(d / RANK.format(0), d / "model_world_size_4_rank_0.pt"),
        "2 and of 4",
    ),
    "of one process, it is said": (lambda d, _: say_one_process(d), "sharded over 2 ranks"),
}


@pytest.mark.parametrize("how", [*OF_PIECES, *OF_RANKS])
def test_what_is_damaged_or_would_run_something_is_refused_in_one_line(how, written, tmp_path):
    name, proof = "plain" if how in OF_PIECES else "verl", tmp_path / "it-ran"
    folder = Path(shutil.copytree(written / name, tmp_path / name))
    spoil, named = (OF_PIECES | OF_RANKS)[how]
    spoil(folder if how in OF_PIECES else folder / "global_step_2" / "actor", proof)
    with pytest.raises(InputError) as refused:
        load_policy(folder if how in OF_PIECES else folder / "global_step_2", base=written)
    assert named in str(refused.value) and "\n" not in str(refused.value)
    assert not proof.exists()


def test_the_optimizers_shards_are_refused_in_the_same_way(written, tmp_path):
    folder = shutil.copytree(written / "verl" / "global_step_2", tmp_path / "global_step_2")
    policy, proof = load_policy(folder, base=written), tmp_path / "it-ran"
    torch.save({"state": {}, "param_groups": [], "a": Evil(proof)}, folder / "actor" / "optim_world_size_2_rank_0.pt")
    with refused("optim_world_size_2_rank_0.pt"):
        read_adamw_state(policy)
    assert not proof.exists()
    (folder / "actor" / "optim_world_size_2_rank_0.pt").unlink()
    with refused():
        read_adamw_state(policy)
    (folder / "actor" / "optim_world_size_2_rank_1.pt").unlink()
    assert read_adamw_state(policy) is None


def test_moments_cut_into_flat_pieces_are_not_taken_for_copies(written, tmp_path):
    # FSDP's first version: each rank holds a plain vector, a piece of several parameters laid end to end.
    folder = shutil.copytree(written / "verl" / "global_step_2", tmp_path / "global_step_2")
    for rank in range(2):
        state = {0: {"step": torch.tensor(2.0), "exp_avg": torch.randn(9), "exp_avg_sq": torch.rand(9)}}
        groups = [{"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}]
        torch.save({"state": state, "param_groups": groups}, folder / f"actor/optim_world_size_2_rank_{rank}.pt")
    with refused("fsdp2"):
        read_adamw_state(load_policy(folder, base=written))


def test_a_configuration_of_another_model_is_refused(written, tmp_path):
    for other in ("llama", "gpt2"):
        base = save_checkpoint(tmp_path / other, other)
        with pytest.raises(InputError):
            load_policy(written / "plain", base=base)


def test_an_adapters_shards_and_another_trainers_names_end_in_what_to_do(written, tmp_path):
    weights = torch.load(written / "accelerate" / "full" / "pytorch_model_fsdp.bin")
    adapter = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(2, 32)}
    whole = {f"base_model.model.{name}": value for name, value in weights.items()}
    titan = {name.replace("model.", "").replace("embed_tokens", "tok_embeddings"): v for name, v in weights.items()}
    titan = {name.replace("self_attn.q_proj", "attention.wq"): v for name, v in titan.items() if "layers" not in name}
    cases = {"alone": (adapter, "lora_adapter"), "beside": (whole | adapter, "lora_adapter")}
    cases["titan"] = (titan | {"tok_embeddings.weight": torch.zeros(3)}, "convert_to_hf.py")
    for name, (state, named) in cases.items():
        (tmp_path / name).mkdir()
        state.pop("lm_head.weight", None)
        torch.save(state, tmp_path / name / "pytorch_model_fsdp.bin")
        with refused(named):
            load_policy(tmp_path / name, base=written)


def test_megatrons_shards_end_in_the_command_that_converts_them(written, tmp_path):
    folder = shutil.copytree(written / "plain", tmp_path / "iter_0000002")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    with refused("convert_torch_dist_to_hf.py", "iter_0000002"):
        load_policy(folder, base=written)
    verl = shutil.copytree(folder, tmp_path / "global_step_2" / "actor" / "dist_ckpt").parents[1]
    with refused("megatron", "/actor"):
        load_policy(verl, base=written)
    nemo = shutil.copytree(folder, tmp_path / "step_2" / "policy" / "weights" / "iter_0000000").parents[2]
    with refused(f"{nemo}/config.yaml", "iter_0000000"):
        load_policy(nemo, base=written)


def test_whole_weights_beside_shards_are_taken_and_their_base_is_refused(written, tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint-2", MODEL)
    shutil.copytree(written / "accelerate" / "checkpoint-2" / "optimizer_0", folder / "optimizer_0")
    policy = load_policy(folder)
    assert policy.configured_by is None and set(read_adamw_state(policy).step.values()) == {STEPS}
    with refused("base"):
        load_policy(folder, base=written)


WRITTEN = ("verl/global_step_2", "nemo/step_2", "prime/step_2", "titan/step-2", "accelerate/checkpoint-2")
"""All but accelerate's file per rank, whose names do not say how many there are."""


@pytest.mark.parametrize("name", [*WRITTEN, "accelerate/checkpoint-1"])
def test_what_is_written_last_or_by_one_rank_alone_is_missed_until_it_is_there(name, written, tmp_path):
    assert missing_part(written / name) is None
    kinds = (".metadata", "*rank*.pt", "*rank*.bin")
    files = sorted(file.relative_to(written / name) for kind in kinds for file in (written / name).rglob(kind))
    files = [file for file in files if "optim" not in str(file)]  # nothing says that there will be one
    assert files
    for number, file in enumerate(files):
        copy = Path(shutil.copytree(written / name, tmp_path / str(number)))
        (copy / file).unlink()
        assert missing_part(copy) is not None, file
