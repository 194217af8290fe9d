"""The instrument: every token's own gradient, as a table; summed gradients of intervals and prompts; what they cost."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
