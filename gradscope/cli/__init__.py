"""The command line: a file per command, shared flags in `flags`; no room is imported before a command is chosen."""

from gradscope.cli.commands import main, run_script
from gradscope.cli.ending import end_at_once, go_on_unread, noting_interruption

__all__ = ["end_at_once", "go_on_unread", "main", "noting_interruption", "run_script"]
