"""Prop. 4.2 in closed form, its bounds, and what norms of real tokens follow."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
