"""Inside verl (0.9.1): what its trainers train on becomes native rollouts, which lose nothing.

    VERL_USE_EXTERNAL_MODULES=gradscope.integrations.verl_rollouts python -m verl.trainer.main_ppo ...

A file per training step, `CHECKPOINTS/gradscope/rollouts/step_000012.parquet`, CHECKPOINTS being verl's
`trainer.default_local_dir`. Settings are environment variables:

- GRADSCOPE_ROLLOUTS: another folder for the files;
- GRADSCOPE_ROLLOUTS_EVERY=10: write every tenth step, from the first one on; none: spikes alone; by default, each;
- GRADSCOPE_ROLLOUTS_SPIKE=3: also write a step whose gradient norm is above 3 times the median of those before it, or
  not finite; GRADSCOPE_ROLLOUTS_SPIKES=10: at most ten of these, as is the default;
- GRADSCOPE_ROLLOUTS_TEXT=1: also write the text of prompt and response; by default, ids alone, which whoever has the
  tokenizer can decode.

The hook is `_update_actor` of verl's trainers, which runs on the driver once for each batch that the actor is trained
on and at no other time; there alone the step's number, the configuration and the batch as it goes to the actor are
together: `compute_advantage` has neither ids nor step, and is called before a critic's warm-up is told from training,
`compute_data_metrics` has no log-probabilities in the default trainer. The trainers are found when verl loads them;
nothing else of verl is loaded. What verl computes stays as it is, and no weights are looked at, so that FSDP, Megatron
and the others are all the same.

The default trainer ("sync" and both asynchronous modes) and the older one (`trainer.use_v1=false`) are served.
Settings, and losses that rows cannot say (`verl_writer.verl_loss`), are refused in one line when verl starts.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from gradscope.errors import InputError
from gradscope.integrations.verl_writer import VerlWriter, put_into, read_settings, verl_loss

try:
    from verl.utils import config as verl_config
except ImportError as error:
    raise ImportError("gradscope.integrations.verl_rollouts works inside verl: pip install verl==0.9.1") from error

TRAINERS = {"verl.trainer.ppo.v1.trainer_base": "PPOTrainer", "verl.trainer.ppo.ray_trainer": "RayPPOTrainer"}
"""Module → its trainer."""


class TrainerFinder(MetaPathFinder):
    """Finds the modules of verl's trainers as Python does, and puts a writer into each once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in TRAINERS else None
        if spec is not None:
            load = spec.loader.exec_module

            def load_and_watch(module: ModuleType) -> None:
                load(module)
                put_into(getattr(module, TRAINERS[name]), VerlWriter(settings))

            spec.loader.exec_module = load_and_watch
        return spec


def _check_loss(validate: Any) -> Any:
    """Let verl's own check of its configuration, with which it starts, also look at the loss."""

    @wraps(validate)
    def validated(config: Any, *args: Any, **keywords: Any) -> Any:
        found = validate(config, *args, **keywords)
        _or_exit(verl_loss, config)
        return found

    return validated


def _or_exit(function: Any, *args: Any) -> Any:
    """Call it; of what a user can mend say one line and end."""
    try:
        return function(*args)
    except InputError as error:
        print(f"gradscope: {error}", file=sys.stderr)
        raise SystemExit(2) from None


settings = _or_exit(read_settings, os.environ)
verl_config.validate_config = _check_loss(verl_config.validate_config)
sys.meta_path.insert(0, TrainerFinder())
