"""Which tokens does an RL update of a language model serve? Exact per-token gradients of a real policy, in one table.

Importing gradscope is instant: every name below loads its room, and with it torch or pandas, on first use.
"""

import lazy_loader

__version__ = "0.1.0.dev0"

# No submodule bears the name of a function: it would shadow it.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=[
        *("diagnosis", "gradients", "intervals", "objective", "plots", "policy", "rollouts", "sampling", "tasks"),
        *("theory", "trainer", "updates"),
    ],
    submod_attrs={
        "diagnosis": ["diagnose", "findings", "make_report", "write_report"],
        "errors": ["InputError", "SelfCheckError"],
        "gradients": ["capture_activations", "capture_gradients", "interval_gradients", "measure"],
        "policy": ["Policy", "checkpoint_step", "load_policy", "read_adamw_state"],
        "rollouts": ["TokenBatch", "read_dump", "read_rollouts"],
        "updates": ["StepSettings", "apply_update", "apply_updates", "compare", "movement_table"],
    },
)
