"""The command line: a file per command, shared flags in `flags`; no room is imported before a command is chosen."""

from gradscope.cli.commands import main, run_script

__all__ = ["main", "run_script"]
