"""Which tokens does an RL update of a language model serve? Exact per-token gradients of a real policy, in one table.

Importing gradscope is instant: every name in __init__.pyi loads its room, and with it torch or pandas, on first use.
"""

import lazy_loader

__version__ = "0.3.0"

# No submodule bears the name of a function: it would shadow it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
