"""A user's own Python file, such as one with a task: run once, and whatever it raises is told on one line."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from gradscope.errors import InputError

RAISED = (Exception, SystemExit)
"""What a user's code may raise: they are told where."""

_files_read: dict[Path, ModuleType] = {}


def run_file(file: Path, what: str) -> ModuleType:
    """The module that a file makes, run the first time. what: such as "task", for the words.

    Raises InputError for a file that does not exist or raises.
    """
    if not os.path.isfile(file):  # of a name that is too long, and of links in a circle, Path raises
        raise InputError(
            f"{what} file {file.absolute()} does not exist; give path/to/file.py:NAME with an existing file"
        )
    file = file.resolve()
    if file in _files_read:
        return _files_read[file]
    spec = importlib.util.spec_from_file_location(f"_gradscope_{what}_{len(_files_read)}_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
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
    """What was raised, on one line."""
    return f"{type(error).__name__} ({' '.join(str(error).split())[:200]})"
