"""Profile exact norms of token gradients on a GPU by part of the engine, in milliseconds per token.

    python -m analyses.gpu.profile_engine --sizes 0.5b --lengths 2048 --modes exact tf32

On a policy of real size with random weights, 96 tokens of one sequence are measured three times: to warm up,
undisturbed (`whole`), and waiting for the device before and after each part. A part's time excludes nested parts, so
that all parts add up to `waited`. `floor`: the FLOPs of `gradient_flops` at the speed of a large product in this mode,
measured on the same device.
"""

from __future__ import annotations

import importlib
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pandas as pd
import torch
import tyro

from analyses.benchmarks.real_size_policy import Size, make_config
from gradscope.gradients import ModelShape, SequenceTokens, TokenGradientMeter, gradient_flops, measuring
from gradscope.policy import Policy, find_blocks

ENGINE = "gradscope.gradients.engine"
PARTS = {
    f"{ENGINE}.decoder.block:linear_square_norms": "norms of matrices",
    f"{ENGINE}.decoder.block:linear_backward": "through matrices",
    f"{ENGINE}.decoder.block:attention_backward": "through attention",
    f"{ENGINE}.decoder.block:attention_backward_at": "through the last attention",
    f"{ENGINE}.decoder.block:rms_norm_backward": "through norms",
    f"{ENGINE}.decoder.block:rotary_backward": "through rotation",
    f"{ENGINE}.decoder.activations:prefix_factor": "factors (QR)",
    f"{ENGINE}.decoder.body:account_for": "check of the blocks",
    f"{ENGINE}.decoder.body:square_norms": "norms of activations",
    f"{ENGINE}.embeddings:embedding_square_norms": "embedding",
    f"{ENGINE}.embeddings:tied_cross_terms": "embedding",
}
HEAD, REST = "head and forward pass", "rest"
TOKENS = 96


@dataclass(frozen=True)
class Options:
    sizes: tuple[Size, ...] = ("0.5b",)
    lengths: tuple[int, ...] = (2048,)
    modes: tuple[Literal["exact", "tf32", "bfloat16"], ...] = ("exact", "tf32")
    tokens: int = TOKENS
    out: Path = Path("figures/cost/data/gpu_profile.csv")


class Clock:
    """Seconds of each part, without nested parts."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device, self._open = device, [REST]
        self._last = self._now()

    def _now(self) -> float:
        wait(self._device)
        return time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Any:
        self._switch(name)
        try:
            yield
        finally:
            self._switch(None)

    def _switch(self, name: str | None) -> None:
        now = self._now()
        self.seconds[self._open[-1]] += now - self._last
        self._last = now
        self._open.pop() if name is None else self._open.append(name)

    def around(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        return timed


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_parts(measure: Callable[[], Any], meter: TokenGradientMeter) -> dict[str, float]:
    """Return the seconds of each part, waiting for the device before and after it."""
    clock = Clock(meter.device)
    with ExitStack() as stack:
        for place, name in PARTS.items():
            module, attribute = place.split(":")
            owner = importlib.import_module(module)
            stack.enter_context(patch.object(owner, attribute, clock.around(getattr(owner, attribute), name)))
        stack.enter_context(patch.object(meter.head, "measure", clock.around(meter.head.measure, HEAD)))
        with clock.part(REST):
            measure()
    return dict(clock.seconds)


def product_speed(device: torch.device, mode: str) -> float:
    """Return the FLOP/s of a large product in this mode."""
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    try:
        size = 8192 if device.type == "cuda" else 1024
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        a @ b
        wait(device)
        start = time.perf_counter()
        for _ in range(5):
            a @ b
        wait(device)
        return 5 * 2 * size**3 / (time.perf_counter() - start)
    finally:
        torch.set_float32_matmul_precision("highest")


def profile(size: Size, length: int, mode: str, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(make_config(size), attn_implementation="eager").eval()
    policy = Policy(model, None, find_blocks(model))
    ids = torch.randint(0, model.config.vocab_size, (length,))
    targets = torch.arange(length - tokens, length)
    sequence = SequenceTokens(ids, targets, torch.arange(tokens))
    about = {"size": size, "length": length, "mode": mode, "tokens": tokens}
    about |= {"machine": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__}
    with measuring(model):
        meter = TokenGradientMeter(policy, ids.to(device), precision=mode)

        def measure() -> None:
            meter.measure_together([sequence])
            wait(device)

        measure()  # warms up
        start = time.perf_counter()
        measure()
        whole = time.perf_counter() - start
        parts = time_parts(measure, meter)
        seconds = parts | {"waited": sum(parts.values()), "whole": whole}
    flops = sum(gradient_flops(ModelShape.of(model), targets.tolist()).values())
    seconds["floor"] = flops / product_speed(device, mode)
    return [about | {"part": name, "ms_per_token": 1e3 * took / tokens} for name, took in seconds.items()]


def main(options: Options) -> None:
    device, rows = torch.device("cuda" if torch.cuda.is_available() else "cpu"), []
    for size in options.sizes:
        for length in options.lengths:
            for mode in options.modes:
                rows += profile(size, length, mode, options.tokens, device)
                table = pd.DataFrame(rows)
                table.round({"ms_per_token": 4}).to_csv(options.out, index=False)
                print(
                    table[(table["length"] == length) & (table["size"] == size) & (table["mode"] == mode)].to_string()
                )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
