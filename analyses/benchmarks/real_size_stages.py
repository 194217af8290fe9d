"""Run `gradscope` with a clock: python -m analyses.benchmarks.real_size_stages EVENTS ARGUMENTS OF GRADSCOPE …

Whenever a stage begins or ends, a line of JSON goes to EVENTS: the stage that continues from then, monotonic and CPU
seconds, the number of forward passes so far, and the GPU's peak memory in bytes since the previous line. A nested stage
is not part of the outer one.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

IMPORTS, REST = "imports", "rest"
STAGES = {
    "gradscope.cli.measuring:load_quietly": "loading",
    "gradscope.rollouts:read_dump": "reading",
    "gradscope.cli.measuring:MeasuringFlags._folder": "hashing",
    "gradscope.gradients.operator.jacobian:TokenGradientMeter.__init__": "structure",
    "gradscope.gradients.table:find_statistics": "statistics",
    "gradscope.gradients.table:check_engine": "self-check",
    "gradscope.gradients.table:TableMeasurement.measure_responses": "tokens",
    "gradscope.diagnosis.summarize:summarize": "summary",
    "gradscope.diagnosis.summarize:write_figures": "figures",
    "gradscope.diagnosis.diagnose:statistics_of": "statistics",
    "gradscope.diagnosis.diagnose:note_logged": "logged log-probabilities",
    "gradscope.diagnosis.products.table:make": "other temperatures",
    "gradscope.diagnosis.products.sums:make": "summed gradients",
    "gradscope.diagnosis.products.predicted_step:make": "steps",
    "gradscope.diagnosis.products.real_step:make": "steps",
    "gradscope.diagnosis.products.comparison:make": "comparison",
    "gradscope.diagnosis.diagnose:assemble": "parts",
    "gradscope.diagnosis.diagnose:say": "findings",
    "gradscope.cli.diagnose:make_report": "report",
    "gradscope.cli.diagnose:write_report": "report",
}
"""{(module of the caller, function or method): stage that its calls count as}."""


class Clock:
    """Records which stage is running."""

    def __init__(self, file: Path) -> None:
        self._out, self._open, self._passes = file.open("a", encoding="utf-8"), [REST], 0
        self._write()

    def staged(self, call: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """Wrap the call as a stage."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._open.append(stage)
            self._write()
            try:
                return call(*args, **kwargs)
            finally:
                self._open.pop()
                self._write()

        return timed

    def count(self, module: Any, _args: Any) -> None:
        """Count forward passes of whole networks, as a global module hook."""
        # Looked up in the class, since attribute lookup in modules is slow.
        self._passes += hasattr(type(module), "set_input_embeddings") and module.base_model is module

    def close(self) -> None:
        self._write()
        self._out.close()

    def _write(self) -> None:
        event = {"stage": self._open[-1], "time": time.monotonic(), "cpu": time.process_time(), "passes": self._passes}
        print(json.dumps(event | {"device_bytes": _most_on_device()}), file=self._out, flush=True)


def _most_on_device() -> int:
    """Return the GPU's peak bytes since the last call; 0 without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def main(events: str, *arguments: str) -> None:
    clock = Clock(Path(events))
    try:
        gradscope = clock.staged(watch, IMPORTS)(clock)
        gradscope(list(arguments))
    finally:
        clock.close()


def watch(clock: Clock) -> Callable[[list[str]], None]:
    """Import gradscope's command line and instrument it."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    from gradscope.cli import main as gradscope

    for place, stage in STAGES.items():
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, import_module(module))
        setattr(owner, name, clock.staged(getattr(owner, name), stage))
    register_module_forward_pre_hook(clock.count)
    return gradscope


if __name__ == "__main__":
    main(*sys.argv[1:])
