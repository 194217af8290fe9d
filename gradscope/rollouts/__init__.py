"""What was sampled: `TokenBatch` and its alignment rule; readers of rollout files, one per trainer in `formats`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
