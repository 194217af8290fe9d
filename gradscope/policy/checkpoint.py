"""Checkpoints as files: the contents of a folder, its training step, and hashes that identify a checkpoint."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from gradscope.errors import InputError, checked
from gradscope.policy.naming import DEEPEST, homes_of, may_be_a_part, named_step
from gradscope.policy.sharded.layouts import Shards, find_weights
from gradscope.runs import Reporter, read_json

if TYPE_CHECKING:
    from gradscope.policy.policy import Policy

_HERE = Path(__file__).parents[1] / "embedded"
EMBEDDED = {"embedded": _HERE / "uncertain", "embedded-certain": _HERE / "certain"}
"""Folders of the bundled Knights & Knaves policies, by name."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter; weights in either format, in peft's order of preference (prime-rl writes the second)."""
MLX_ADAPTER = "adapters.safetensors"
"""File of an adapter that mlx_lm trained, beside an adapter_config.json of its own."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", ADAPTER_WEIGHTS[1])
"""Patterns of weight files, in order of preference."""
STATE = "trainer_state.json"
"""File in which trainers record a checkpoint's step."""
WORTH_A_THREAD = 1 << 26
"""Bytes of weights above which hashing (a twentieth of a second) gets a thread."""

_State = tuple[tuple[Path, int, int], ...]
_AHEAD: dict[_State, Future[str]] = {}
"""Hashes being computed in threads, by the files' names, sizes and times."""


def is_adapter(folder: Path) -> bool:
    """Return whether this is a peft adapter. Raises InputError if a model is beside it, or a part is missing."""
    if not os.path.isfile(folder / ADAPTER_CONFIG):
        return False
    if model_weights(folder):
        # transformers would follow adapter_config.json to its base and ignore these weights.
        raise InputError(
            f"{folder} holds both an adapter and a whole model's weights; give a folder with only one of them"
        )
    if adapter_weights(folder) is None and (folder / MLX_ADAPTER).is_file():
        raise InputError(
            f"{folder} is an adapter of mlx ({MLX_ADAPTER}), whose names and scales are not peft's; fuse it into its "
            "base (mlx_lm.fuse) and give that folder"
        )
    if adapter_weights(folder) is None:
        raise InputError(
            f"{folder} holds {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS[0]}; save the adapter there with save_pretrained"
        )
    return True


def adapter_weights(folder: Path) -> Path | None:
    """Return the file of adapter tensors that peft would read, if any."""
    return next((folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)


def model_weights(folder: Path) -> list[Path]:
    """Return the weight files of a whole model in the folder, sorted by name."""
    # Adapters may come with further tensors, such as new_embeddings.safetensors.
    patterns = ("model*.safetensors", "pytorch_model*.bin")
    found = ([file for file in _files(folder, kind) if "_fsdp" not in file.name] for kind in patterns)
    return next((files for files in found if files), [])


def shards_of(folder: Path) -> Shards | None:
    """Return the sharded weights of a distributed trainer; None if the folder holds a whole model or no weights."""
    return None if not os.path.isdir(folder) or model_weights(folder) else find_weights(folder)


def configuration_home(folder: Path, shards: Shards, base: str | Path | None = None) -> Path:
    """Return the folder with the configuration of sharded weights: `base`, or else beside or above the shards.

    Raises InputError if there is none, since not every trainer saves one with its shards.
    """
    if base is not None:
        return Path(find_checkpoint(str(base)))
    around = [shards.folder.parent, *tokenizer_places(shards.folder)]
    places = [folder, shards.folder, shards.folder / "huggingface", *around]
    # A training run's config.json is not a model's.
    found = (place for place in places if "model_type" in (read_json(place / "config.json") or {}))
    if (home := next(found, None)) is None:
        raise InputError(
            f"{shards.folder} holds weights in shards, but no model's config.json; give the folder of the model "
            "that was trained with --base"
        )
    return home


def refuse_training_run(folder: Path) -> None:
    """Raise InputError for a run's folder or a checkpoint with folders for its parts, naming the model to give."""
    # Of a name that is too long, Path raises.
    if not os.path.isdir(folder) or model_weights(folder) or (folder / ADAPTER_CONFIG).is_file():
        return
    if find_weights(folder) is not None:  # DeepSpeed's are in a subfolder named after the step
        return
    if found := list_step_folders(folder):
        newest = max(found, key=lambda path: (named_step(path), path.name))
        newest = model_of_step(newest) or newest
        raise InputError(
            f"{folder} is the folder of a training run, not a model; give one of its checkpoints, such as the newest: "
            f"{newest}"
        )
    if not (folder / "config.json").is_file() and (inner := _model_within(folder)) is not None:
        raise InputError(f"{folder} holds no config.json; the model of this checkpoint is in {inner}: give that folder")


def list_step_folders(run: Path) -> list[Path]:
    """List the subfolders of a run that are named after a training step, whatever they hold."""
    kinds = ("*", "checkpoints/*", "weights/*")
    return [path for kind in kinds for path in run.glob(kind) if named_step(path) is not None and path.is_dir()]


def model_of_step(folder: Path) -> Path | None:
    """Return the folder to load for a step: this one if it holds shards, else the outermost model in it."""
    return folder if find_weights(folder) is not None else _model_within(folder)


def _model_within(folder: Path) -> Path | None:
    """Return the outermost folder of a model or adapter inside a checkpoint."""
    level = [folder]
    for _ in range(DEEPEST):
        for place in level:
            if (place / ADAPTER_CONFIG).is_file() or ((place / "config.json").is_file() and model_weights(place)):
                return place
        inside = (path for place in level for path in place.iterdir() if path.is_dir())
        level = sorted(path for path in inside if may_be_a_part(path))
    return None


@checked
def checkpoint_step(path: str | Path) -> int | None:
    """Return the training step at which a checkpoint was saved; None if neither its files nor its path say.

    Tries in this order: `global_step` (transformers, TRL) or `step` (gradscope) in the trainer_state.json of the
    folder, or of the checkpoint that it is part of (actor/huggingface, lora_adapter, policy/weights); then the number
    in the name of the innermost folder named after a step (checkpoint-500, step-000040, global_step_20, iter_0000500),
    or of the one named by DeepSpeed's `latest`. Links are followed if the path itself says nothing.

    >>> checkpoint_step("runs/grpo/checkpoint-500"), checkpoint_step("runs/verl/global_step_20/actor/huggingface")
    (500, 20)
    >>> checkpoint_step("models/final") is None
    True
    """
    for place in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        homes = homes_of(Path(place))
        for home in homes:
            state = read_json(home / STATE) or {}  # missing or unreadable: try the name
            steps = [state.get(name) for name in ("global_step", "step")]
            if found := [step for step in steps if isinstance(step, int) and not isinstance(step, bool)]:
                return found[0]
        if (step := named_step(homes[-1])) is not None:
            return step
    shards = shards_of(Path(path))
    return None if shards is None else named_step(shards.folder)


def checkpoint_name(path: str | Path) -> str:
    """Return a name for a checkpoint that is unique within its run: the step's folder if there is one, or its own.

    >>> checkpoint_name("runs/verl/global_step_20/actor/huggingface"), checkpoint_name("models/final")
    ('global_step_20', 'final')
    """
    folder = Path(os.path.abspath(path))
    home = homes_of(folder)[-1]
    # Resolve "." and ".."; and links on a page must not contain characters with a meaning in URLs.
    return re.sub(r"[:\\]", "_", (folder if named_step(home) is None else home).name) or "checkpoint"


def checkpoint_homes(folder: Path) -> list[Path]:
    """Return the folder, and the checkpoint above it if it is the `adapter` folder of gradscope's trainer."""
    return [folder, folder.parent] if folder.name == "adapter" else [folder]


def tokenizer_places(folder: Path) -> list[Path]:
    """Return the folders that may hold a checkpoint's tokenizer: the weights', its other parts, the run."""
    homes = homes_of(Path(os.path.abspath(folder)))
    if named_step(homes[-1]) is None:
        return [folder, folder.absolute().parent] if folder.name == "adapter" else [folder]
    # verl keeps it in actor/huggingface, NeMo-RL in policy/tokenizer.
    around = [place for home in homes[1:] for place in (home, home / "huggingface", home / "tokenizer")]
    return [folder, *around, homes[-1].parent]


def find_checkpoint(name: str) -> str:
    """Return a model's folder: an embedded policy's, `name` itself, or a copy in the Hugging Face cache.

    Models on the hub are owner/model. Nothing is downloaded: raises InputError if it is not in the local cache.
    """
    if name in EMBEDDED:
        return str(EMBEDDED[name])
    if os.path.isdir(name) or not is_hub_name(name):
        return name
    if (cached := cached_snapshot(name)) is None:
        raise InputError(
            f"{name} is not a folder, nor is a model of that name in the local Hugging Face cache; gradscope downloads "
            f"nothing: run `hf download {name}`, or give the folder of a checkpoint"
        )
    return cached


def cached_snapshot(name: str, revision: str | None = None) -> str | None:
    """Return the folder of a model of the hub in the local cache; None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return snapshot_download(name, revision=revision, local_files_only=True)
    except (OSError, ValueError, HfHubHTTPError):
        return None


def is_hub_name(name: str) -> bool:
    """Return whether this could be the name of a model on the hub, owner/model."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def weights_hash(path: str | Path) -> str:
    """Return the SHA-256 of a checkpoint's weight files, in order of their names."""
    files = _weight_files(path)
    ahead = _AHEAD.pop(_state(files), None)
    return _hash_files(files) if ahead is None else ahead.result()


def hash_ahead(path: str | Path) -> None:
    """Start computing `weights_hash` of a checkpoint in a thread while it loads; small ones are hashed later."""
    files = _weight_files(path) if os.path.isdir(path) else []  # of a name that is too long, Path raises
    if sum(file.stat().st_size for file in files) < WORTH_A_THREAD:
        return
    _AHEAD[_state(files)] = found = Future()

    def run() -> None:
        try:
            found.set_result(_hash_files(files))
        except OSError as error:
            found.set_exception(error)

    # A daemon thread, so that a failing command does not wait for it.
    Thread(target=run, daemon=True).start()


def configuration_hash(path: str | Path) -> str:
    """Return the SHA-256 of the configuration and tokenizer files, which also affect results."""
    kinds = ("config.json", ADAPTER_CONFIG, "tokenizer", "vocab", "merges", "tekken")
    kinds += ("special_tokens", "added_tokens", "chat_template")
    return _hash_files(sorted(p for p in Path(path).iterdir() if p.is_file() and p.name.startswith(kinds)))


def policy_hashes(policy: Policy) -> dict[str, str]:
    """Return the hashes `model` and `configuration` of a loaded policy, including an adapter's base."""
    configured = configuration_hash(policy.configured_by or policy.path)
    found = {"model": weights_hash(policy.path), "configuration": configured}
    if policy.base is not None:
        stack = (policy.base, *policy.below)
        base = {"base_model": _all_in_one(map(weights_hash, stack))}
        base |= {"base_configuration": _all_in_one(map(configuration_hash, stack))}
        found |= base | {"params": policy.params}
    return found


def _all_in_one(hashes: Iterable[str]) -> str:
    """Combine the hashes of several folders; a single one is unchanged."""
    first, *others = hashes
    return hashlib.sha256(" ".join((first, *others)).encode()).hexdigest() if others else first


def _weight_files(path: str | Path) -> list[Path]:
    whole = next((found for kind in WEIGHTS if (found := _files(Path(path), kind))), [])
    shards = None if whole else find_weights(Path(path))
    return whole if shards is None else [file for file in shards.files if file.is_file()]


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the folder's regular files by name, since reading others, such as pipes, might never end."""
    return sorted(path for path in folder.glob(pattern) if path.is_file())


def _state(files: list[Path]) -> _State:
    stats = ((file.absolute(), file.stat()) for file in files)
    return tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def _hash_files(files: list[Path]) -> str:
    digest, size = hashlib.sha256(), sum(file.stat().st_size for file in files)
    with Reporter().stage("hashing weights", size / 1e6, "MB") as advance:
        for file in files:
            with file.open("rb") as handle:
                while chunk := handle.read(1 << 22):
                    digest.update(chunk)
                    advance(len(chunk) / 1e6)
    return digest.hexdigest()
