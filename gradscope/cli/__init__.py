"""The command line: a file per command, shared flags in `flags`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "commands": ["main", "run_script"],
        "pages": ["STATISTICS", "describe_rollouts"],
    },
)
