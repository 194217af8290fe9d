"""GRPO and REINFORCE++ with Advantage Reweighting and Lopti (arXiv:2505.12929), short enough to read in one sitting.

Read `loop` first: sample, score, advantages, passes, log, checkpoint. The loss and the optimizer steps are those of
`gradscope.objective`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "checkpoints": ["OPTIMIZER", "step_of", "list_checkpoints"],
        "config": ["TrainConfig"],
        "loop": ["train"],
        "metrics": ["scalars"],
        "plan": ["GIB", "Plan", "find_lengths", "plan_training", "step_rates"],
        "presets": ["PRESETS", "get_preset"],
        "rollout": ["Questions"],
    },
)
