"""What the rules need of a sequence's inputs, made once and shared by all of its prefixes."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.capture.claims import parameter_slopes
from gradscope.capture.recording import Call
from gradscope.capture.rules import prefix_factor


class Factors:
    """Factors and slopes of one sequence's inputs, made when first needed and shared by all of its prefixes."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._whole: dict[str, list[Call]] = {}
        self._made: dict[object, object] = {}

    def remember(self, calls: list[Call]) -> None:
        """Take the calls of a pass over the whole sequence; later passes repeat the first."""
        if not self._whole:
            for call in calls:
                self._whole.setdefault(call.name, []).append(call)

    def factor(self, flow: list[tuple[Call, Tensor]]) -> Tensor:
        """The factor of a linear module's inputs, over as many rows as the calls have."""
        call, bias = flow[0][0], flow[0][0].module.bias is not None
        whole = self._whole_call(call) if len(flow) == 1 else None
        if whole is None:
            return prefix_factor(torch.cat([c.inputs.flatten(0, -2) for c, _ in flow]), bias=bias)
        key = (whole.input_key, bias)
        if key not in self._made:
            self._made[key] = prefix_factor(whole.inputs.flatten(0, -2), bias=bias)
        rows, made = call.inputs.shape[:-1].numel(), self._made[key]
        return made[:rows, :rows]  # Triangular: the other columns are zero.

    def slopes(self, call: Call) -> list[Tensor]:
        """∂output/∂parameter of a diagonal module, over the call's rows, for each parameter."""
        whole = self._whole_call(call)
        if whole is None:
            return list(parameter_slopes(call.module, call.inputs))
        if call.name not in self._made:
            self._made[call.name] = list(parameter_slopes(call.module, whole.inputs))
        return [slope[:, : call.inputs.shape[1]] for slope in self._made[call.name]]

    def _whole_call(self, call: Call) -> Call | None:
        """The whole sequence's call of the same module, if this call's rows are its first rows."""
        whole = self._whole.get(call.name, [])
        if len(whole) != 1 or not whole[0].by_position(self.length) or call.inputs.ndim != whole[0].inputs.ndim:
            return None
        first = whole[0].inputs[:, : call.inputs.shape[1]]
        if first.shape != call.inputs.shape:  # A second axis that is not positions, as long by chance.
            return None
        # Rows in another order than the positions' (sorted by expert, say) would be others than the prefix's.
        tolerance = 1e-4 if first.dtype in (torch.float32, torch.float64) else 0.05
        same = (first - call.inputs).norm() <= tolerance * first.norm()
        return whole[0] if same else None


def join(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate, without a copy where there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
