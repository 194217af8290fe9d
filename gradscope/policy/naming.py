"""Trainers' naming of folders: finding a checkpoint's training step in its path."""

from __future__ import annotations

import re
from pathlib import Path

DEEPEST = 6
"""Most folder levels between a checkpoint and its weights; step_500/policy/weights/model/consolidated has four."""

_DATE = r"(?:19|20)\d\d[-_.]?(?:0[1-9]|1[0-2])[-_.]?(?:0[1-9]|[12]\d|3[01])(?!\d)"
_COUNTED = "step|checkpoint|ckpt|iter|iteration|update"
# "step-7b" and "ckpt-1.5" are sizes and versions, "checkpoint-2026-11-20" is a date.
_NUMBER = rf"(=|[-_]?)(?!{_DATE})(\d+)(?![a-z\d]|\.\d)"
_GLOBAL = re.compile(rf"global[-_]?steps?{_NUMBER}")
"""verl's global_step_20, DeepSpeed's global_step20, AReaL's epoch0epochstep19globalstep19."""
_STEP = re.compile(rf"(?<![a-z])(?:{_COUNTED})s?{_NUMBER}")
"""checkpoint-500, step-000040, step_500, iter_0000500, epoch=0-step=500."""
_STEPS = re.compile(r"(?<![a-z\d.])(\d+)[-_]?steps$")
_TRAINERS = re.compile(r"global[-_]?step[-_]?\d|iter_\d{7}")
_ALONE = re.compile(rf"(?!{_DATE})\d+")
"""500, a step within a folder of checkpoints: actor/500."""
_CHECKPOINTS = re.compile(rf"(?<![a-z])(?:{_COUNTED}|actor|policy|weight|hf)s?(?![a-z])")
_PARTS = re.compile(
    "(actor|policy|student|agent|generator|models?|llm|lm|weights|huggingface|hf|lora|adapters?|peft|merged?|unmerged"
    "|consolidated|sharded|unsharded|export|exported|converted|saved?|pretrained|checkpoints?|ckpts?|trainer|train|rank"
    "|mp|tp|pp|dp|fsdp|megatron|deepspeed|zero|universal|dcp|dist|distcp|torch|pytorch|safetensors|state|dict|fp|bf"
    "|b?float|half|full|whole|default|text|items|to|and|the|of)?[0-9]*"
)
"""Words in the names of a checkpoint's subfolders: actor/huggingface, policy/weights."""


def homes_of(folder: Path) -> list[Path]:
    """Return the folder and its parents within the same checkpoint, innermost first.

    The list ends at the folder named after a step, or at a name that is not a checkpoint's part: in
    sft/checkpoint-1000/grpo/final, `final` belongs to another run. Below unambiguous names (global_step_20,
    iter_0000500), the folder itself may have any name.

    >>> [home.name for home in homes_of(Path("run/global_step_20/actor/huggingface"))]
    ['huggingface', 'actor', 'global_step_20']
    >>> [home.name for home in homes_of(Path("sft/checkpoint-1000/grpo/final"))]
    ['final']
    """
    homes = _around(folder)
    if named_step(homes[-1]) is None and _TRAINERS.match((around := _around(folder.parent))[-1].name.lower()):
        return [folder, *around]
    return homes


def _around(folder: Path) -> list[Path]:
    """Return the folders that belong to one checkpoint, judging by their names."""
    homes = [folder]
    while len(homes) <= DEEPEST and homes[-1].name and may_be_a_part(homes[-1]):
        homes.append(homes[-1].parent)
    steps = [named_step(home) for home in homes]
    told = [place for place, step in enumerate(steps) if step is not None]
    # NeMo-RL's Megatron writer does not count steps: step_500/policy/weights/iter_0000000 is step 500.
    last = next((place for place in told if steps[place]), told[0] if told else len(homes) - 1)
    return homes[: last + 1]


def may_be_a_part(folder: Path) -> bool:
    """Return whether the folder's name is that of a checkpoint's part."""
    if (step := named_step(folder)) is not None:
        return step == 0
    return not folder.name.isdecimal() and _are_parts(folder.name.lower())


def _are_parts(words: str) -> bool:
    return all(_PARTS.fullmatch(word) for word in re.split(r"[-_. ]", words))


def named_step(folder: Path) -> int | None:
    """Return the training step in a folder's own name, ignoring its parents.

    >>> [named_step(Path(name)) for name in ("checkpoint-500", "global_step500_hf", "iter_0000500", "ckpt/500")]
    [500, 500, 500, 500]
    >>> [named_step(Path(name)) for name in ("v0-20261120-101500", "checkpoint-2026-11-20", "phi-4", "runs/7", "hf")]
    [None, None, None, None, None]
    """
    name = folder.name.lower()
    for pattern in (_GLOBAL, _STEP):
        for found in reversed([*pattern.finditer(name)]):
            # "step_2_rl" is a stage of a recipe; "checkpoint-500-merged" and "step=500-loss=0.1" are checkpoints.
            if found[1] == "=" or _are_parts(name[found.end() :].lstrip("-_. ")):
                return int(found[2])
    if found := _STEPS.search(name):
        return int(found[1])
    if _ALONE.fullmatch(name) and _CHECKPOINTS.search(folder.parent.name.lower()):
        return int(name)
    return None
