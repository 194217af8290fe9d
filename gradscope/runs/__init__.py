"""Folders written whole or not at all, resumed and locked; several processes; tensors too large for memory."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "ending": ["end_at_once"],
        "files": [
            "file_hash",
            "is_table",
            "plain_json",
            "read_json",
            "replacing",
            "write_json",
            "write_parquet",
            "write_text",
        ],
        "folder": [
            "MANIFEST",
            "RunFolder",
            "UNWRITABLE",
            "check_is_folder",
            "check_results",
            "check_writable",
            "library_versions",
            "provenance",
        ],
        "lock": ["locked"],
        "processes": ["ALONE", "Processes", "deal_by_cost", "whole", "worker_context"],
        "scratch": ["check_room", "scratch_zeros"],
        "user_code": ["RAISED", "in_words", "run_file"],
    },
)
