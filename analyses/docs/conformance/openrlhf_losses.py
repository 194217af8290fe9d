"""OpenRLHF's policy loss, in an environment that has openrlhf: prints the rows as JSON.

    PYTHONPATH=. PYTHON -m analyses.docs.conformance.openrlhf_losses

Two micro-batches make a step, whose numbers are those of `iter_grad_accum_global_norm`; DeepSpeed divides each backward
loss by two. See `losses.py`.
"""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from typing import Any, NamedTuple

from torch import Tensor

from analyses.docs.conformance.losses import (
    BY_RESPONSE,
    CLIPS,
    MICRO_BATCHES,
    averages,
    documented_weights,
    import_alone,
    judge_slopes,
    make_tensors,
)

DOCUMENTED = {
    "token-mean": "mean over the tokens of the global batch",
    BY_RESPONSE: "mean over responses of token means",
}


class Case(NamedTuple):
    """A loss under one setting."""

    kind: str = "ppo"
    """policy_loss_type"""
    by_token: bool = True
    """token_level_loss"""
    dual: float | None = None
    whole: bool = True
    """Whether the loss gets the numbers of the step."""
    empty: bool = False
    """Whether a response is masked altogether."""

    @property
    def average(self) -> str:
        return "token-mean" if self.by_token and self.kind != "gspo" else BY_RESPONSE

    def __str__(self) -> str:
        told = [f"policy_loss_type={self.kind}", f"token_level_loss={self.by_token}"]
        told += [f"dual_clip={self.dual:g}"] if self.dual else []
        told.append("two micro-batches" if self.whole else "the batch's numbers not given")
        return ", ".join([*told, *(["a response masked altogether"] if self.empty else [])])


CASES = (
    Case(),
    Case(by_token=False),
    Case(dual=1.2),
    Case("gspo"),
    Case(whole=False),
    Case(by_token=False, whole=False),
    Case(by_token=False, empty=True),
    Case(by_token=False, whole=False, empty=True),
)


def slopes(case: Case, old: Tensor, new: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return −∂loss/∂ log π [B, T], summed over micro-batches."""
    loss = import_alone("openrlhf.models.loss", "deepspeed").PolicyLoss(
        CLIPS["clip_ratio_low"], CLIPS["clip_ratio_high"], case.dual, case.by_token, case.kind
    )
    leaf, parts = new.clone().requires_grad_(True), [[*range(len(mask))]]
    infos: Any = [({}, {})]
    if case.whole:
        numbers = import_alone("openrlhf.utils.loss_utils").iter_grad_accum_global_norm
        parts = [list(part) for part in MICRO_BATCHES]
        infos = numbers([mask[rows].double() for rows in parts], None, len(parts), lambda item: item)
    for rows, (_, info) in zip(parts, infos, strict=True):
        found = loss(leaf[rows], old[rows], advantages[rows], mask[rows].double(), **info)[0]
        (found / len(parts)).backward()
    return -leaf.grad


def make_row(case: Case) -> dict[str, Any]:
    """Return the row of a case."""
    started, tensors = time.perf_counter(), make_tensors(empty=case.empty)
    weighting = None
    if case.kind == "gspo":
        weighting = f"gspo:eps_low={CLIPS['clip_ratio_low']},eps_high={CLIPS['clip_ratio_high']}"
    weights = documented_weights(weighting, *tensors, clips=CLIPS | {"clip_ratio_c": case.dual})
    row = {"trainer": "OpenRLHF", "version": version("openrlhf"), "case": str(case)}
    row |= {"documented": DOCUMENTED[case.average]}
    mask = tensors[-1]
    row |= judge_slopes(slopes(case, *tensors), weights, mask, averages(mask)[case.average])
    return row | {"seconds": f"{time.perf_counter() - started:.1f}"}


if __name__ == "__main__":
    print(json.dumps([make_row(case) for case in CASES]))
