"""Two gloo processes that train a tiny model under FSDP for two steps and save it in the ways of several trainers.

python shard_writers.py OUT, with the environment that torchrun gives its processes. Beside the shards, rank 0 writes
what it gathered: OUT/whole.pt, with `model` and `optimizer` by parameter name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from support.policies import VOCAB, make_model

MODEL = "qwen2"
STEPS = 2


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model(MODEL)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = train(model, {name for name, p in model.named_parameters() if p.dim() > 1})
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        model.config.save_pretrained(out)
        torch.save(dict(zip(("model", "optimizer"), whole, strict=True)), out / "whole.pt")
    save_everywhere(out, model, optimizer)
    # FSDP's first version, accelerate's default.
    first = FullyShardedDataParallel(
        make_model(MODEL),
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0]).__mro__[1]}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    decayed = {name for name, p in model.named_parameters() if p.dim() > 1}
    save_with_accelerate(out / "accelerate" / "checkpoint-1", first, train(first, decayed), version=1)
    dist.barrier()
    dist.destroy_process_group()


def train(model: nn.Module, decayed: set[str]) -> torch.optim.Optimizer:
    """Take the steps; the optimizer that took them, with weight decay on the parameters of these names."""
    named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
    groups = [
        {"params": [p for name, p in named.items() if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(4, VOCAB, (2, 12), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def save_everywhere(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    weights, state = get_state_dict(model, optimizer)
    _, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=out / "plain")
    dcp.save({"app": App({"model": weights, "optimizers": state})}, checkpoint_id=out / "prime" / "step_2" / "trainer")
    # torchtitan's: the model's tensors at the top, the optimizer's state flat.
    dcp.save({**weights, "optimizer": flat, "train_state": {"step": STEPS}}, checkpoint_id=out / "titan" / "step-2")
    nemo = out / "nemo" / "step_2" / "policy"
    dcp.save({"model": weights}, checkpoint_id=nemo / "weights")
    dcp.save({"optim": App({"optim": state})}, checkpoint_id=nemo / "optimizer")
    save_with_accelerate(out / "accelerate" / "checkpoint-2", model, optimizer)
    save_otherwise(out, model, optimizer)
    ranks = out / "verl" / "global_step_2" / "actor"
    ranks.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), ranks / f"model_world_size_{world}_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), ranks / f"optim_world_size_{world}_rank_{rank}.pt")


def save_otherwise(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As compiled models and plain `state_dict()` of an optimizer are saved; weights cut along other dimensions."""
    numbered = {"state": optimizer.state_dict()["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    compiled = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    dcp.save({"net": compiled, "optimizer": numbered}, checkpoint_id=out / "numbered")
    world, cut = dist.get_world_size(), {}
    for number, (name, value) in enumerate(model.state_dict().items()):
        mesh = init_device_mesh("cpu", (1, world) if number % 2 else (world, 1), mesh_dim_names=("ddp", "fsdp"))
        ways = [[Replicate(), Shard(0)], [Replicate(), Shard(-1)], [Replicate(), Replicate()]]
        how = ways[number % 3][:: 1 if number % 2 else -1]
        cut[name] = distribute_tensor(value.full_tensor(), mesh, how)
    (out / "hybrid").mkdir(exist_ok=True)
    torch.save(cut, out / "hybrid" / f"model_world_size_{world}_rank_{dist.get_rank()}.pt")
    torch.save(optimizer.state_dict(), out / "hybrid" / f"optim_world_size_{world}_rank_{dist.get_rank()}.pt")


class App(Stateful):
    """What asks to be saved as a dictionary of its own."""

    def __init__(self, state: dict) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state_dict: dict) -> None:
        self.state = state_dict


def save_with_accelerate(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, version: int = 2) -> None:
    """By accelerate's own functions: as shards; of FSDP 2 also as a file per rank, and whole."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    state = PartialState(cpu=True)
    for kind, place, keywords in (
        ("SHARDED_STATE_DICT", out, {}),
        ("SHARDED_STATE_DICT", out.with_name("ranks"), {"use_dcp": False}),
        ("FULL_STATE_DICT", out.with_name("full"), {}),
    ):
        if place is not out and version == 1:  # a file per rank would hold ShardedTensors, which are not read
            continue
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
        save_fsdp_model(plugin, state, model, str(place), **keywords)
        save_fsdp_optimizer(plugin, state, optimizer, model, str(place), **keywords)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
