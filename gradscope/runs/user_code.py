"""Running a user's Python file, such as one with a task, once, with its errors reported on one line."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from gradscope.errors import InputError

RAISED = (Exception, SystemExit)
"""Exceptions from a user's code that are reported with their place."""

_files_read: dict[Path, ModuleType] = {}


def run_file(file: Path, what: str) -> ModuleType:
    """Import a file as a module, executing it the first time. what: its role, such as "task", for messages.

    Raises InputError for a file that does not exist or raises.
    """
    if not os.path.isfile(file):  # Path raises for overlong names and circular links
        raise InputError(
            f"{what} file {file.absolute()} does not exist; give path/to/file.py:NAME with an existing file"
        )
    file = file.resolve()
    if file in _files_read:
        return _files_read[file]
    spec = importlib.util.spec_from_file_location(f"_gradscope_{what}_{len(_files_read)}_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up modules there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[spec.name]
        if not isinstance(error, RAISED):
            raise
        raise InputError(f"the {what} file {file} raised {in_words(error)} when it was run; mend it") from error
    _files_read[file] = module
    return module


def in_words(error: BaseException) -> str:
    """Describe an exception on one line."""
    return f"{type(error).__name__} ({' '.join(str(error).split())[:200]})"
