"""GRPO and REINFORCE++ with Advantage Reweighting and Lopti (arXiv:2505.12929), short enough to read in one sitting.

Read `loop` first: sample, score, advantages, passes, log, checkpoint. The loss and the optimizer steps are those of
`gradscope.objective`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
