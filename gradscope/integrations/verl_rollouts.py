"""Write what verl's (0.9.1) trainers train on as lossless native rollouts.

    VERL_USE_EXTERNAL_MODULES=gradscope.integrations.verl_rollouts python -m verl.trainer.main_ppo ...

Each training step gets a file `CHECKPOINTS/gradscope/rollouts/step_000012.parquet`, where CHECKPOINTS is verl's
`trainer.default_local_dir`. Settings are environment variables:

- GRADSCOPE_ROLLOUTS: another folder for the files;
- GRADSCOPE_ROLLOUTS_EVERY=10: write every tenth step, starting with the first (default: every step); none: only spikes;
- GRADSCOPE_ROLLOUTS_SPIKE=3: also write a step whose gradient norm is above 3 times the median of the previous ones, or
  not finite; GRADSCOPE_ROLLOUTS_SPIKES=10: at most ten of these (the default);
- GRADSCOPE_ROLLOUTS_TEXT=1: also write the text of prompt and response; by default only ids, which anyone with the
  tokenizer can decode.

The hook is `_update_actor` of verl's trainers, which runs on the driver exactly once for each batch that the actor is
trained on. Only there are the step's number, the configuration and the actor's batch available together:
`compute_advantage` has neither ids nor step and also runs during a critic's warm-up, and `compute_data_metrics` has no
log-probabilities in the default trainer. The hook is installed when verl loads its trainers, and loads nothing else of
verl. verl's computation is unchanged and weights are not read, so that FSDP, Megatron and others make no difference.

Both the default trainer ("sync" and both asynchronous modes) and the older one (`trainer.use_v1=false`) are supported.
Invalid settings, and losses that rows cannot express (`verl.batch_writer.verl_loss`), are refused in one line when verl
starts.
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
from gradscope.integrations.verl.batch_writer import VerlWriter, put_into, read_settings, verl_loss

try:
    from verl.utils import config as verl_config
except ImportError as error:
    raise ImportError("gradscope.integrations.verl_rollouts works inside verl: pip install verl==0.9.1") from error

TRAINERS = {"verl.trainer.ppo.v1.trainer_base": "PPOTrainer", "verl.trainer.ppo.ray_trainer": "RayPPOTrainer"}
"""Module → name of its trainer."""


class TrainerFinder(MetaPathFinder):
    """Import hook that adds a writer to each of verl's trainers once its module is loaded."""

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
    """Extend verl's check of its configuration at startup to the loss."""

    @wraps(validate)
    def validated(config: Any, *args: Any, **keywords: Any) -> Any:
        found = validate(config, *args, **keywords)
        _or_exit(verl_loss, config)
        return found

    return validated


def _or_exit(function: Any, *args: Any) -> Any:
    """Call the function; on an InputError, print one line and exit with status 2."""
    try:
        return function(*args)
    except InputError as error:
        print(f"gradscope: {error}", file=sys.stderr)
        raise SystemExit(2) from None


settings = _or_exit(read_settings, os.environ)
verl_config.validate_config = _check_loss(verl_config.validate_config)
sys.meta_path.insert(0, TrainerFinder())
