"""Send histograms, alerts and pages to the trackers of a transformers trainer.

TensorBoard, Weights & Biases, trackio and MLflow, if the trainer's `report_to` has started them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from gradscope.integrations.trl.internals import tracker_modules


def send_histograms(
    trainer: Any, heights: Mapping[str, Float[np.ndarray, " bins"]], edges: Float[np.ndarray, " ends"], step: int
) -> None:
    """Send histograms by name; heights are sums over the intervals between the edges."""
    for callback in trainer.callback_handler.callbacks:
        if (writer := getattr(callback, "tb_writer", None)) is not None:
            for name, sums in heights.items():
                _to_tensorboard(writer, f"train/{name}", sums, edges, step)
    for backend in tracker_modules(trainer):
        drawn = {f"train/{n}": backend.Histogram(np_histogram=(sums, edges)) for n, sums in heights.items()}
        backend.log(drawn | {"train/global_step": step})


def send_alert(trainer: Any, title: str, text: str, *, warn: bool) -> None:
    """Send an alert to Weights & Biases and trackio."""
    for backend in tracker_modules(trainer):
        backend.alert(title=title, text=text, level=backend.AlertLevel.WARN if warn else backend.AlertLevel.INFO)


def send_page(trainer: Any, page: Path, name: str = "gradscope-live") -> None:
    """Send a page as an artifact of this name to Weights & Biases, trackio and MLflow."""
    for backend in tracker_modules(trainer):
        backend.log_artifact(str(page), name=name, type="report")
    for backend in tracker_modules(trainer, ["mlflow"]):
        backend.log_artifact(str(page))


def _to_tensorboard(writer: Any, name: str, sums: np.ndarray, edges: np.ndarray, step: int) -> None:
    middles = (edges[:-1] + edges[1:]) / 2
    whole, squares = float(sums @ middles), float(sums @ middles**2)
    ends = {"min": edges[0], "max": edges[-1], "num": sums.sum(), "sum": whole, "sum_squares": squares}
    writer.add_histogram_raw(
        name, **ends, bucket_limits=edges[1:].tolist(), bucket_counts=sums.tolist(), global_step=step
    )
