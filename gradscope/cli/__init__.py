"""The command line: a file per command, shared flags in `flags`; nothing else is imported until a command is chosen."""

from gradscope.cli.commands import main, run_script

__all__ = ["main", "run_script"]
