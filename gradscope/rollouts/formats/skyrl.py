"""SkyRL's trainer.dump_data_batch: {export_path}/dumped_data/global_step_{N}_training_input.pkl, a padded batch.

A file is a `TrainingInputBatch`: {name: tensor}, as bytes with shape and dtype, and the trainer's metadata. Tensors
other than `sequences` and `attention_mask` cover only the last columns of these two. It is read without running code,
and may hold nothing but SkyRL's own container.

`action_log_probs` are the trainer's own log-probabilities, `rollout_logprobs` the sampler's; losses with ratios to the
sampler's skip the trainer's forward pass, so `action_log_probs` are missing. `loss_mask` keeps the trained tokens,
including an end-of-sequence token that SkyRL appends to responses that stopped without one.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradscope.errors import BROKEN_FILE, InputError, first_line, show
from gradscope.rollouts.formats.base import FILLED_UP, IMAGES, ROUTED, Format, optional, required
from gradscope.runs import load_tensors

WANTED = "give SkyRL's dumped_data/global_step_N_training_input.pkl"
MODULES = ("skyrl.backends.skyrl_train.training_batch", "skyrl_train.training_batch")
"""Modules in which SkyRL and, earlier, skyrl-train define their batches."""
HARMLESS = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE"),
        *("TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "SETITEM", "SETITEMS", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"),
    )
)
"""Pickle instructions in SkyRL's files; none can use more memory than the file's size justifies."""
WHOLE = ("sequences", "attention_mask")
OF_RESPONSES = (
    *("response_mask", "loss_mask", "advantages"),
    *("action_log_probs", "rollout_logprobs", "base_action_log_probs"),
)
"""Columns to read; values, returns, experts and images are ignored."""
DTYPES = frozenset({"bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"})


class _Batch(dict):
    """Stand-in for SkyRL's class; `state` is the data from which that class would build its tensors."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _rebuild(_kind: type, state: Any) -> _Batch:
    batch = _Batch()
    batch.state = state
    return batch


class _Unpickler(pickle.Unpickler):
    """Unpickler that replaces SkyRL's container and torch's wrappers with inert stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        if module in MODULES and name in ("TrainingInputBatch", "TensorBatch"):
            return _Batch
        if module in MODULES and name == "_rebuild_tensor_batch":
            return _rebuild
        if (module, name) in PASSED_OVER:
            return _pass_over
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


PASSED_OVER = frozenset(
    {
        ("torch", "device"),
        # SkyRL 0.1 pickles its tensors a second time, in torch's own way.
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "OrderedDict"),
    }
)


def _pass_over(*args: Any) -> None:
    """Return None."""


def _read_batch(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row's place and columns (ids, per-token values)."""
    state = _unpickle(path)
    batch, metadata = state["batch_dict"], state["metadata"] or {}
    given = {name: batch[name] for name in (*WHOLE, *OF_RESPONSES) if batch.get(name) is not None}
    columns = {name: _tensor(path, name, value) for name, value in given.items()}
    for name in (*WHOLE, "response_mask", "loss_mask"):
        if name not in columns:
            raise InputError(f"it has no `{name}`; {WANTED}", path=path)
    rows, width = columns["sequences"].shape
    length = columns["response_mask"].shape[1]
    for name, values in columns.items():
        wanted = (rows, width if name in WHOLE else length)
        if values.shape != wanted or length > width or not rows:
            raise InputError(f"`{name}` has shape {[*values.shape]}, `sequences` {[rows, width]}; {WANTED}", path=path)
    prompts, real = _prompts(metadata, rows), rows - _padding(metadata)
    for row in range(rows):
        told = {"is_padding": row >= real, "is_routed": batch.get("rollout_expert_indices") is not None}
        told["has_images"] = batch.get("pixel_values") is not None
        yield f"{path}, row {row}", _columns(columns, row, prompts.get(row)) | told


def _columns(columns: dict[str, np.ndarray], row: int, prompt: int | None) -> dict[str, Any]:
    """Return a row's values; response columns are cut to the response's first through last token."""
    ids, real = columns["sequences"][row], columns["attention_mask"][row] != 0
    places = np.flatnonzero(columns["response_mask"][row])
    first, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
    before = len(ids) - columns["response_mask"].shape[1]
    found = {"prompt_ids": ids[: before + first][real[: before + first]].tolist()}
    found["response_ids"] = ids[before + first : before + end].tolist()
    found |= {name: columns[name][row, first:end].tolist() for name in OF_RESPONSES if name in columns}
    return found | ({} if prompt is None else {"prompt": prompt})


def _prompts(metadata: Any, rows: int) -> dict[int, int]:
    """Return each row's prompt number, if the batch records which rows share a prompt."""
    bounds = metadata.get("policy_prompt_boundaries") if isinstance(metadata, dict) else None
    if not isinstance(bounds, list):
        return {}
    pairs = [pair for pair in bounds if isinstance(pair, tuple) and [*map(type, pair)] == [int, int]]
    sound = len(pairs) == len(bounds) and all(0 <= start < end <= rows for start, end in pairs)
    return {row: number for number, (start, end) in enumerate(pairs) for row in range(start, end)} if sound else {}


def _padding(metadata: Any) -> int:
    """Return the number of padding rows at the end of the batch."""
    size = metadata.get("pad_size", 0) if isinstance(metadata, dict) else 0
    return size if type(size) is int and size >= 0 else 0


def _unpickle(path: Path) -> dict[str, Any]:
    """Return the batch's state. Raises InputError if the file holds anything but a batch."""
    try:
        content = path.read_bytes()
        for instruction, _, _ in pickletools.genops(content):
            if instruction.name not in HARMLESS:
                raise pickle.UnpicklingError(f"it holds the instruction {instruction.name}")
        batch = _Unpickler(io.BytesIO(content)).load()
    except (*BROKEN_FILE, MemoryError) as error:
        raise InputError(
            f"it cannot be read as a SkyRL batch ({first_line(error)}); nothing in it was run; {WANTED}", path=path
        ) from error
    state = batch.state if isinstance(batch, _Batch) else None
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict) or "metadata" not in state:
        raise InputError(f"it holds {show(batch)}, not a batch; {WANTED}", path=path)
    return state


def _tensor(path: Path, name: str, value: Any) -> np.ndarray:
    """Return a column as an array, from bytes with shape and dtype or, for dtypes that numpy lacks, torch's format."""
    try:
        if value["format"] == "torch":
            return load_tensors(path, content=value["data"]).double().numpy()
        if value["dtype"] not in DTYPES:
            raise ValueError(f"dtype {value['dtype']}")
        return np.frombuffer(value["data"], dtype=value["dtype"]).reshape(value["shape"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError(f"`{name}` is not a tensor ({first_line(error)}); {WANTED}", path=path) from error


SKYRL = Format(
    "skyrl",
    (
        *required(response_mask="loss_mask", sampled="response_mask", sequences="sequences"),
        *required(attention_mask="attention_mask"),
        *optional(prompt_ids="prompt_ids", response_ids="response_ids", group="prompt"),
        *optional(old_logprobs="action_log_probs", advantage="advantages"),
        *optional(sampler_logprobs="rollout_logprobs", ref_logprobs="base_action_log_probs"),
        *optional(old_logprobs="rollout_logprobs"),
    ),
    suffix=".pkl",
    read=_read_batch,
    step_in="global_step_([0-9]{1,18})",
    left_out=(
        (FILLED_UP, lambda record: record.columns["is_padding"]),
        (IMAGES, lambda record: record.columns["has_images"]),
    ),
    remarks=((ROUTED, lambda record: record.columns["is_routed"]),),
    notes=(
        "ratios are relative to SkyRL's action_log_probs (the trainer's own, before the step) if the log has them, "
        "otherwise to its rollout_logprobs; its corrections for the sampler's are not applied",
    ),
)
