"""File layouts of sharded checkpoints by writer; reads nothing except DeepSpeed's `latest`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradscope.errors import InputError

Kind = Literal["dcp", "ranks", "zero"]


@dataclass(frozen=True)
class Shards:
    """The files of a model's sharded weights, or of an optimizer's sharded state."""

    kind: Kind
    """dcp: torch.distributed.checkpoint. ranks: one torch.save per rank (verl, SkyRL, accelerate). zero: DeepSpeed."""
    folder: Path
    files: tuple[Path, ...]
    """All files to read, by name."""


_IN_RUNS = ("", "pytorch_model_fsdp_0", "actor", "policy", "policy/weights", "weights", "trainer", "dist_ckpt")
WEIGHTS = (*_IN_RUNS, "actor/dist_ckpt")
"""Places of the weights in a checkpoint's folder: accelerate and transformers (pytorch_model_fsdp_0), verl (actor),
SkyRL (policy), NeMo-RL (policy/weights), prime-rl (trainer), Megatron in verl (dist_ckpt)."""
MOMENTS = (*_IN_RUNS, "optimizer_0", "policy/optimizer", "optimizer")
"""Places of the optimizer's state."""
_RANKED = {
    part: re.compile(rf"(?:{verl}_world_size_(?P<count>\d+)_rank_|{accelerate}_0_rank)(?P<rank>\d+)\.(pt|bin)")
    for part, verl, accelerate in (("weights", "model", "pytorch_model_fsdp"), ("moments", "optim", "optimizer"))
}
_WHOLE = {"weights": "pytorch_model_fsdp.bin", "moments": "optimizer.bin"}
"""Files that accelerate writes with FULL_STATE_DICT, with everything in one file."""
_ZERO = {"weights": "*_model_states.pt", "moments": "*_optim_states.pt"}

Part = Literal["weights", "moments"]


def find_weights(folder: Path) -> Shards | None:
    """Find the sharded weights of the checkpoint in this folder, if any."""
    places = [folder / place for place in WEIGHTS]
    if folder.name == "huggingface":  # verl and SkyRL keep the configuration next to the shards
        places.append(folder.parent)
    iterations = [*(folder / "policy" / "weights").glob("iter_*")]  # NeMo-RL with Megatron
    places += iterations if len(iterations) == 1 else []
    return next((found for place in places if (found := _at(place, "weights")) is not None), None)


def find_moments(folder: Path) -> list[Shards]:
    """Return possible places of a checkpoint's sharded optimizer state, most likely first."""
    places = [folder / place for place in MOMENTS]
    beside = {"pytorch_model_fsdp_0": "optimizer_0", "weights": "optimizer", "huggingface": ""}
    if folder.name in beside:
        places.append(folder.parent / beside[folder.name])
    return [found for place in places if (found := _at(place, "moments")) is not None]


def moments_at(path: Path) -> Shards | None:
    """Return the sharded optimizer state in this folder, or the one that contains this rank's file, if any."""
    if os.path.isdir(path):
        return _at(path, "moments")
    part = any(pattern.fullmatch(path.name) for pattern in _RANKED.values()) or path.match(_ZERO["moments"])
    return _at(path.parent, "moments") if part else None


def _at(place: Path, part: Part) -> Shards | None:
    if not os.path.isdir(place):  # of a name that is too long, Path raises
        return None
    pieces = sorted(place.glob("*.distcp"))
    if pieces or (place / ".metadata").is_file():
        return Shards("dcp", place, (place / ".metadata", *pieces))
    if ranked := _ranked(place, part):
        return Shards("ranks", place, ranked)
    if (tag := _tagged(place)) is not None:
        states = sorted(tag.glob(_ZERO[part]))
        # The fp32 weights are in the optimizer's files, so the weights need both kinds of file.
        models = sorted(tag.glob(_ZERO["weights"]))
        return Shards("zero", tag, (*models, *sorted(tag.glob(_ZERO["moments"])))) if states else None
    return None


def _ranked(place: Path, part: Part) -> tuple[Path, ...]:
    """Return one file per rank, in order. Raises InputError for a missing one and for mixed runs."""
    found = [(match, file) for file in place.iterdir() if (match := _RANKED[part].fullmatch(file.name))]
    if not found:
        whole = place / _WHOLE[part]
        return (whole,) if whole.is_file() else ()
    counts = sorted({match["count"] for match, _ in found if match["count"]}, key=int)
    if len(counts) > 1:
        raise InputError(
            f"{place} holds shards of {' and of '.join(counts)} processes; keep those of one save and remove the others"
        )
    files = {int(match["rank"]): file for match, file in found}
    count = int(counts[0]) if counts else len(files)
    if missing := sorted(set(range(count)) - files.keys()):
        raise InputError(
            f"{place} lacks the shard of rank {missing[0]} of {count} ({next(iter(files.values())).name} is there); "
            "copy the files of all ranks there"
        )
    return tuple(files[rank] for rank in range(count))


def _tagged(place: Path) -> Path | None:
    """Return the folder of DeepSpeed's states: this one, the one named in `latest`, or the only global_step."""
    if any(place.glob(_ZERO["weights"])) or any(place.glob(_ZERO["moments"])):
        return place
    steps = [path for path in place.iterdir() if re.fullmatch(r"global_step\d+", path.name) and path.is_dir()]
    latest = place / "latest"
    if not latest.is_file() or latest.stat().st_size > 1000:
        return steps[0] if len(steps) == 1 else None
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if re.fullmatch(r"\w[\w.-]*", tag) and (place / tag).is_dir():
        return place / tag
    if steps:
        raise InputError(
            f"{latest} names {tag!r:.60}, which does not exist; give the folder of the states, such as {steps[0]}"
        )
    return None
