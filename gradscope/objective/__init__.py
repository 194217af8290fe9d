"""The equations: advantages, token weights, the loss, log π, and the optimizer step that is trained and measured."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
