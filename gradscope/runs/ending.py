"""How a process that was launched with others ends."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable


def end_at_once(call: Callable[[], None]) -> None:
    """Call it and, in one of several processes, end with its status before Python takes itself apart.

    Threads of torch's process group may still free a tensor of the last exchange, which aborts a Python that ends
    meanwhile. A process that was not launched with others ends as ever.
    """
    if "WORLD_SIZE" not in os.environ:
        call()
        return
    try:
        call()
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(status)
