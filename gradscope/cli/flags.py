"""Flags shared by several commands, checks of their values, and quiet loading of a policy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
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
OWN = tyro.conf.arg(help_behavior_hint="(default: float32 on a CPU, the checkpoint's own on a GPU)")
"""The default precision."""
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
Rollouts = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROLLOUTS")]
Many = tyro.conf.arg(help_behavior_hint="(default: none)")
"""For a flag that takes several values."""


def parse_object(given: str) -> dict[str, Any]:
    """Parse a JSON object.

    >>> parse_object('{"enable_thinking": false}')
    {'enable_thinking': False}
    """
    try:
        value = parse_json(given)
    except ValueError as error:
        raise ValueError(f"{given!r} is no JSON ({error}); give an object, such as '{EXAMPLE}'") from error
    if not isinstance(value, dict):
        raise ValueError(f"{given!r} is a JSON {type(value).__name__}; give an object, such as '{EXAMPLE}'")
    return value


EXAMPLE = '{"enable_thinking": false}'


def parse_memory(given: str) -> int:
    """Parse a number of bytes with or without a unit.

    >>> parse_memory("2GiB"), parse_memory("500 MB"), parse_memory("1e9")
    (2147483648, 500000000, 1000000000)
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt]?)(i?)b?)?", given.strip().lower())
    try:
        number, unit, binary = float(found[1]), found[2] or "", 1024 if found[3] else 1000
        size = int(number * binary ** " kmgt".index(unit or " "))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{given!r} is not a number of bytes; give one such as 2GiB") from error
    return size


@dataclass(frozen=True, kw_only=True)
class PolicyFlags:
    """Flags for loading a policy."""

    base: str | None = None
    """An adapter's base model, if adapter_config.json does not name a local folder; or the configuration of shards."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    dtype: Annotated[Dtype | None, OWN] = None
    """Precision of weights and arithmetic."""
    device: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: a GPU where there is one)")] = None
    """Torch device: cpu, cuda, cuda:1, …"""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, such as '{"enable_thinking": false}'."""

    @property
    def loading(self) -> dict[str, Any]:
        """Return the keywords of `load_policy`."""
        return pick(self, PolicyFlags)


def pick(flags: PolicyFlags, kind: type) -> dict[str, Any]:
    """Return the values of the flags that this dataclass declares."""
    return {each.name: getattr(flags, each.name) for each in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class MeasuredPolicyFlags(PolicyFlags):
    """Flags for loading a policy to measure."""

    params: Literal["all", "adapter"] = "all"
    """Parameters to measure: all (with an adapter merged into its base), or only the adapter's."""
    device_map: str | None = None
    """Spread the policy over several devices instead of --device: auto, balanced, … as in transformers."""
    blocks: str | None = None
    """Name of the ModuleList of blocks, if it is not found automatically."""
    dtype: Annotated[Dtype | Literal["upcast"] | None, OWN] = None
    """Precision of weights and arithmetic. upcast: keep the checkpoint's half-precision weights and upcast each matrix
    to float32 while it is used, for float32's results in half of the memory."""

    @property
    def loading(self) -> dict[str, Any]:
        return pick(self, MeasuredPolicyFlags)


@dataclass(frozen=True, kw_only=True)
class ReadingFlags(MeasuredPolicyFlags):
    """Flags for reading rollouts, and for the policy that sampled them."""

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
        return {name: getattr(self, name) for name in ("format", "step", "reward_key", "chat_template_kwargs")}


@dataclass(frozen=True, kw_only=True)
class ResponseFlags:
    """Flags for responses to a task's questions."""

    data: Annotated[tuple[str, ...], Many] = ()
    """Files of the task's questions, wildcards allowed, as given or below $GRADSCOPE_DATA; none: the task
    generates them."""
    max_new_tokens: int = 1024
    """Longest response in tokens, also limited by the policy's context."""
    engine: Literal["hf", "vllm"] = "hf"
    """Sampling engine: transformers or vLLM."""


@dataclass(frozen=True, kw_only=True)
class DecodingFlags(ResponseFlags):
    """Flags of a command that samples and measures nothing."""

    temperature: float = 1.0
    """Sampling temperature; tokens are drawn from the whole vocabulary."""
    seed: int = 0
    """Seed for the questions and the responses."""
    batch_size: int = 64
    """hf: responses decoded together; affects only speed and memory."""


@dataclass(frozen=True, kw_only=True)
class SamplingFlags(ResponseFlags):
    """Flags for sampling rollouts: responses to the questions of a task, or to prompts."""

    task: str | None = None
    """A registered task (knights-knaves-compact, math, …) or path/to/file.py:NAME: prompts and a reward."""
    prompts: Path | None = None
    """Instead of a task: a text file with one prompt per line, or JSONL with a field "prompt" (a string or a chat)."""
    questions: int = 16
    """Number of questions."""
    n: int = 8
    """Responses per question."""


def find_loss_flags(args: Sequence[str]) -> tuple[str, ...]:
    """Return the loss settings given on a command line.

    >>> find_loss_flags(["rollouts.jsonl", "--kl-coef", "0.001", "--no-kl-corrected"])
    ('kl_coef', 'kl_corrected')
    """
    given = {arg.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_") for arg in args}
    given |= {"weighting"} if "update" in given else set()
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


REGISTRY = tyro.constructors.ConstructorRegistry()


def one_word(
    metavar: str, parse: Callable[[str], Any], kind: Any, show: Callable[[Any], str] = str
) -> tyro.constructors.PrimitiveConstructorSpec:
    """Return how to read a flag's value from one word, and to show it; None is "none"."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda given: parse(given[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: ["none" if value is None else show(value)],
    )


def or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Parse "none" as None."""
    return lambda given: None if given.lower() == "none" else parse(given)


MemoryFlag = Annotated[
    int | None,
    one_word("BYTES", or_none(parse_memory), int | None),
    tyro.conf.arg(help_behavior_hint="(default: a sixth of what is free; for instance 4GiB)"),
]


def _parse_path(given: str) -> Path:
    if not given:
        raise ValueError("it is empty; give a path")  # Path("") is the current folder
    return Path(given)


def _number_or(number: Callable[[str], Any], *words: str) -> Callable[[str], Any]:
    return or_none(lambda given: word if (word := given.lower()) in words else number(given))


VALUES = {
    str: ("NAME", str),
    int: ("N", int),
    float: ("X", float),
    int | float: ("X", float),
    Path: ("PATH", _parse_path),
}
"""Type → how its value is named in the help, and how it is parsed."""
WORDS = {
    int | Literal["auto", "enough"] | None: (int, "auto", "enough"),
    int | Literal["own", "all"] | None: (int, "own", "all"),
    int | float | Literal["default"] | None: (float, "default"),
}
"""Type → its numbers, and the words in place of one."""


@REGISTRY.primitive_rule
def _name_value(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Show a single word for a flag's value in the help, even if it may be "none"."""
    if info.type == dict[str, Any] | None:
        return one_word("JSON", or_none(parse_object), dict | None, json.dumps)
    if info.type in WORDS:
        number, *words = WORDS[info.type]
        return one_word("|".join(["N", *words, "none"]), _number_or(number, *words), int | float | str | None)
    for kind, (name, parse) in VALUES.items():
        if info.type in (kind, kind | None):
            return one_word(name, parse if info.type == kind else or_none(parse), info.type)
    return None
