"""A loaded checkpoint or adapter, its tokenizer and blocks, and its saved optimizer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
