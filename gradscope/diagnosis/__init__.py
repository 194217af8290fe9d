"""A checkpoint's diagnosis: results, findings in words, figures, and the HTML page in `page`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
