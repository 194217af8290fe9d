"""Which tokens does an RL update of a language model serve? Exact per-token gradients of a real policy, in one table.

Importing gradscope is instant: every name below loads its module, and with it torch or pandas, on first use.
"""

from importlib import import_module

__version__ = "0.1.0.dev0"

# Public function or class → the module that defines it. No submodule bears one of these names: it would shadow them.
_DEFINED_IN = {
    "InputError": "errors",
    "Policy": "models",
    "SelfCheckError": "errors",
    "StepSettings": "step_settings",
    "TokenBatch": "batch",
    "apply_update": "updates",
    "apply_updates": "updates",
    "capture_activations": "capture",
    "capture_gradients": "capture",
    "checkpoint_step": "models",
    "diagnose": "diagnosis",
    "interval_gradients": "group_gradients",
    "load_policy": "models",
    "make_report": "report.contents",
    "measure": "token_table",
    "movement_table": "updates",
    "read_adamw_state": "saved_optimizer",
    "read_dump": "readers",
    "read_rollouts": "readers",
    "write_report": "report.contents",
}
_SUBMODULES = (
    "bounds", "capture", "diagnosis", "diagnosis_words", "directions", "drivers", "gains", "group_gradients",
    "influence", "intervals", "jacobians", "logit_diagnosis", "norm_estimates", "objective", "plot_diagnosis",
    "plot_updates", "plots", "report", "tasks", "theory", "tuning", "updates",
)  # fmt: skip

__all__ = ["__version__", *_DEFINED_IN, *_SUBMODULES]


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
    globals()[name] = value  # the next look-up no longer comes here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
