"""What was sampled: `TokenBatch` and its alignment rule; readers of rollout files, one per trainer in `formats`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "batch": ["LARGEST", "ROUNDING", "Response", "TokenBatch", "collate"],
        "dump": ["Dump", "keep_own_step"],
        "formats.base": ["Note"],
        "files": ["list_files", "rollouts_hash"],
        "formats.native": ["write_rollouts"],
        "reading": ["READERS", "read_dump", "read_rollouts"],
    },
)
