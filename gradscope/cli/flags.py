"""Flags shared by several commands, checks of their values, and quiet loading of a policy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gradscope.errors import InputError
from gradscope.objective import LossSettings
from gradscope.policy import Policy, check_prompt
from gradscope.rollouts import Dump, Step
from gradscope.runs import SILENT, Progress, Reporter, is_first, parse_json
from gradscope.tasks import Question

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
_OWN = tyro.conf.arg(help_behavior_hint="(default: float32 on a CPU, the checkpoint's own on a GPU)")
DtypeFlag = Annotated[Dtype | None, _OWN]
MeasuredDtypeFlag = Annotated[Dtype | Literal["upcast"] | None, _OWN]
DeviceFlag = Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: a GPU where there is one)")]


def parse_object(given: str) -> dict[str, Any] | None:
    """Parse a JSON object; "none" gives None.

    >>> parse_object('{"enable_thinking": false}')
    {'enable_thinking': False}
    """
    if given.lower() == "none":
        return None
    try:
        value = parse_json(given)
    except ValueError as error:
        raise ValueError(f"{given!r} is no JSON ({error}); give an object, such as '{EXAMPLE}'") from error
    if not isinstance(value, dict):
        raise ValueError(f"{given!r} is a JSON {type(value).__name__}; give an object, such as '{EXAMPLE}'")
    return value


EXAMPLE = '{"enable_thinking": false}'


def parse_memory(given: str) -> int | None:
    """Parse a number of bytes with or without a unit; "none" gives None.

    >>> parse_memory("2GiB"), parse_memory("500 MB"), parse_memory("1e9")
    (2147483648, 500000000, 1000000000)
    """
    if given.lower() == "none":
        return None
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt]?)(i?)b?)?", given.strip().lower())
    try:
        number, unit, binary = float(found[1]), found[2] or "", 1024 if found[3] else 1000
        size = int(number * binary ** " kmgt".index(unit or " "))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{given!r} is not a number of bytes; give one such as 2GiB") from error
    return size


MemoryFlag = Annotated[
    int | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="BYTES",
        instance_from_str=lambda given: parse_memory(given[0]),
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: [str(value).lower()],
    ),
    tyro.conf.arg(help_behavior_hint="(default: a sixth of what is free; for instance 4GiB)"),
]


@dataclass(frozen=True, kw_only=True)
class PolicyFlags:
    """Flags for loading a policy."""

    base: str | None = None
    """An adapter's base model, if adapter_config.json does not name a local folder; or the configuration of shards."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    dtype: DtypeFlag = None
    """Precision of weights and arithmetic."""
    device: DeviceFlag = None
    """Torch device: cpu, cuda, cuda:1, …"""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, such as '{"enable_thinking": false}'."""

    @property
    def loading(self) -> dict[str, Any]:
        """Return the keywords of `load_policy`."""
        files = {"base": self.base, "trust_remote_code": self.trust_remote_code}
        files["chat_template_kwargs"] = self.chat_template_kwargs
        return files | {"dtype": self.dtype, "device": self.device}


@dataclass(frozen=True, kw_only=True)
class ReadingFlags:
    """Flags for reading rollouts."""

    format: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: detected from the columns)")] = None
    """Format of the rollouts: native, trl, verl, prime_rl, …, or FILE.py:NAME, a format of your own."""
    step: Step = None
    """Training step whose responses to take, or all. own: the step that the checkpoint sampled (the one after its own
    number), or the nearest in the log. none: the same, but diagnose and compare add earlier steps if it has too few
    prompts for confidence intervals."""
    reward_key: str | None = None
    """Entry to use as the reward, if the log's rewards are dictionaries."""
    loss_flags: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Loss settings given by flags; the others come from the log, if recorded there."""

    def own_loss(self, loss: LossSettings, dump: Dump) -> LossSettings:
        """Return the loss settings: the log's if recorded, overridden by flags."""
        if dump.loss is None:
            return loss
        return replace(LossSettings.from_log(dump.loss), **{name: getattr(loss, name) for name in self.loss_flags})

    @property
    def reading(self) -> dict[str, Any]:
        """Return the keywords of `read_dump`, except the temperature."""
        named = {name: getattr(self, name) for name in ("format", "step", "reward_key")}
        return named | {"chat_template_kwargs": getattr(self, "chat_template_kwargs", None)}


@dataclass(frozen=True, kw_only=True)
class MeasuredPolicyFlags(PolicyFlags):
    """Flags for loading a policy to measure."""

    params: Literal["all", "adapter"] = "all"
    """Parameters to measure: all (with an adapter merged into its base), or only the adapter's."""
    device_map: str | None = None
    """Spread the policy over several devices instead of --device: auto, balanced, … as in transformers."""
    blocks: str | None = None
    """Name of the ModuleList of blocks, if it is not found automatically."""
    dtype: MeasuredDtypeFlag = None
    """Precision of weights and arithmetic. upcast: keep the checkpoint's half-precision weights and upcast each matrix
    to float32 while it is used, for float32's results in half of the memory."""

    @property
    def loading(self) -> dict[str, Any]:
        return super().loading | {"params": self.params, "device_map": self.device_map, "blocks": self.blocks}

    def outline(self, model: str) -> Policy:
        """Return the policy without weights, to plan for another machine."""
        from gradscope.policy import find_whole, outline_policy

        quiet_transformers()
        names = ("dtype", "blocks", "trust_remote_code")
        return outline_policy(find_whole(model, self.base), **{name: getattr(self, name) for name in names})


def find_loss_flags(args: Sequence[str]) -> tuple[str, ...]:
    """Return the loss settings given on a command line.

    >>> find_loss_flags(["rollouts.jsonl", "--kl-coef", "0.001", "--no-kl-corrected"])
    ('kl_coef', 'kl_corrected')
    """
    given = {arg.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_") for arg in args}
    return tuple(field.name for field in fields(LossSettings) if field.name in given)


def print_notes(notes: Sequence[str]) -> None:
    """Print notes, one per line."""
    for note in notes:
        print(f"note: {note}")


@cache
def command_progress() -> Progress:
    """Return the command's progress reporter; silent in all processes but the first."""
    return Reporter() if is_first() else SILENT


def load_quietly(path: str, loading: Mapping[str, Any]) -> Policy:
    """Call `load_policy` without transformers' progress bars and warnings. loading: of `PolicyFlags`."""
    from gradscope.policy import load_policy

    loading = dict(loading)
    spread = loading.pop("device_map", None)
    if spread is not None:
        if loading["device"] is not None:
            raise InputError(f"--device is {loading['device']} and --device-map {spread}; give one of the two")
        loading["device"] = spread
    quiet_transformers()
    with command_progress().stage("loading the policy"):
        return load_policy(path, **loading)


def check_prompts(questions: Sequence[Question], *, parquet: bool) -> None:
    """Raise InputError for invalid prompts, or for prompts that no parquet column can hold."""
    import pyarrow as pa

    for index, question in enumerate(questions):
        check_prompt(question.prompt, f"question {index}")
    try:
        pa.array([question.prompt for question in questions] if parquet else [])
    except pa.ArrowException as error:
        raise InputError(
            "the prompts have mixed types, which a parquet column cannot hold "
            f"({str(error).splitlines()[0]}); give strings only, or chats of one form only"
        ) from error


def quiet_transformers() -> None:
    """Silence transformers' progress bars and warnings for the rest of the process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def check_no_plan(flops: float | None) -> None:
    """Raise InputError if the speed of another machine is given without --plan."""
    if flops is not None:
        raise InputError(f"--flops is {flops}, but it needs --plan; add --plan, or leave it out")


Many = tyro.conf.arg(help_behavior_hint="(default: none)")
"""For a flag that takes several values."""

REGISTRY = tyro.constructors.ConstructorRegistry()


def _parse_path(given: str) -> Path:
    if not given:
        raise ValueError("it is empty; give a path")  # Path("") is the current folder
    return Path(given)


@REGISTRY.primitive_rule
def _name_value(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Show a single word for a flag's value in the help, even if it may be "none"."""
    words = {str: ("NAME", str), int: ("N", int), float: ("X", float), int | float: ("X", float)}
    words[Path] = "PATH", _parse_path
    kind = next((kind for kind in words if info.type in (kind, kind | None)), None)
    if kind is None:
        return None
    word, make = words[kind]
    optional = info.type != kind
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=word,
        instance_from_str=lambda given: None if optional and given[0].lower() == "none" else make(given[0]),
        is_instance=lambda value: isinstance(value, info.type),
        str_from_instance=lambda value: [str(value).lower() if value is None else str(value)],
    )


@REGISTRY.primitive_rule
def _json_object(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Parse a JSON object, or none."""
    if info.type != dict[str, Any] | None:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda given: parse_object(given[0]),
        is_instance=lambda value: value is None or isinstance(value, dict),
        str_from_instance=lambda value: ["none" if value is None else json.dumps(value)],
    )


@REGISTRY.primitive_rule
def _number_or_word(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Parse a number, one of some words, or none."""
    known = {int | Literal[each] | None: (each, int) for each in (("auto", "enough"), ("own", "all"))}
    known[int | float | Literal["default"] | None] = ("default",), float
    found, number = known.get(info.type, (None, int))
    if found is None:
        return None
    words = dict(zip(found, found, strict=True)) | {"none": None}
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join(["N", *words]),
        instance_from_str=lambda given: words[w] if (w := given[0].lower()) in words else number(w),
        is_instance=lambda value: value in words.values() or isinstance(value, int | number),
        str_from_instance=lambda value: [str(value).lower()],
    )
