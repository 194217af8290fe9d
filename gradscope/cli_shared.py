"""What several commands share: flags, and a quiet way to load a policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tyro

from gradscope.models import Policy

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
DtypeFlag = Annotated[
    Dtype | None, tyro.conf.arg(help_behavior_hint="(default: float32 on a CPU, the checkpoint's own on a GPU)")
]
DeviceFlag = Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: a GPU where there is one)")]


def load_quietly(path: str, **settings: Any) -> Policy:
    """`load_policy` without the progress bars and remarks of transformers: what is wrong is said in one line."""
    from gradscope.models import load_policy

    quiet_transformers()
    return load_policy(path, **settings)


def quiet_transformers() -> None:
    """No progress bars and no remarks of transformers, for the rest of the process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
