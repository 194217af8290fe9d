"""What an optimizer step does to every token: movements, directions, first-order influence, screening in `tuning`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
