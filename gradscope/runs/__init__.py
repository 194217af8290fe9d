"""Folders written whole or not at all, resumed and locked; several processes; tensors too large for memory."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "ending": ["end_at_once"],
        "folder": [
            "MANIFEST",
            "RunFolder",
            "UNWRITABLE",
            "check_is_folder",
            "check_results",
            "check_writable",
            "file_hash",
            "is_table",
            "library_versions",
            "plain_json",
            "read_json",
            "write_json",
            "write_parquet",
            "write_text",
        ],
        "lock": ["locked"],
        "processes": ["ALONE", "Processes", "deal_by_cost", "whole"],
        "scratch": ["check_room", "scratch_zeros"],
    },
)
