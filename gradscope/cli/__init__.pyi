"""What is at the door: a file is loaded when one of its names is first used."""

from .commands import main as main, run_script as run_script
from .pages import STATISTICS as STATISTICS, describe_rollouts as describe_rollouts
