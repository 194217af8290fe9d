"""Figures: DataFrame in, Axes out, the CSV of what is shown beside each."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
