"""The self-check: compares the engine on a few tokens with plain autograd."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite

import torch
from torch import Tensor

from gradscope.errors import InputError, SelfCheckError
from gradscope.gradients.engine.meter import TokenGradientMeter
from gradscope.gradients.engine.plain import TokenNorms, measure_plainly
from gradscope.gradients.engine.results import FAST_TOLERANCES, FLOOR, TOLERANCES, SelfCheck, TokenGradients
from gradscope.gradients.engine.stack import SequenceTokens
from gradscope.policy import arithmetic_dtype

ALL = "all parameters"
NEAR = 16
"""Tokens this close are assumed to share a chunk, in which one token could corrupt another's norms."""


def check_engine(meter: TokenGradientMeter, sequences: list[SequenceTokens]) -> SelfCheck:
    """Compare the engine with plain autograd on some tokens; call inside `measuring(policy.model)`.

    sequences: their measured tokens are compared. As in a measurement, the engine takes each with nearby tokens, or
    else with the response token before it, and two sequences of similar length together. Raises SelfCheckError naming
    the layer or module that differs most; InputError if a gradient overflows float16.
    """
    tolerance = max(TOLERANCES[arithmetic_dtype(meter.model)], FAST_TOLERANCES.get(meter.precision, 0.0))
    count, largest = 0, 0.0
    for sequence, ours in zip(sequences, _measure_together(meter, sequences), strict=True):
        ids, targets = sequence.ids, sequence.asked.targets
        how = {"temperature": sequence.temperature, "metric": meter.metric, "of": meter.of}
        how["candidates"] = sequence.asked.candidates
        plain = [*measure_plainly(meter.model, meter.blocks, ids, targets, **how)]  # to its end, which restores flags
        engine = _read(ours, sequence.measured)
        for own, target, oracle in zip(engine, targets.tolist(), plain, strict=True):
            differences = _compare(own, oracle)
            worst = max(differences, key=differences.__getitem__)
            if arithmetic_dtype(meter.model) == torch.float16 and not isfinite(own.param_grad_norm):
                raise InputError(
                    f"the gradient of token {target} of a sequence of {len(ids)}, divided by temperature "
                    f"{sequence.temperature:g}, exceeds float16's {torch.finfo(torch.float16).max:g}; give the "
                    "temperature that the rollouts were sampled at, or --dtype bfloat16 or float32"
                )
            if not differences[worst] <= tolerance:
                raise SelfCheckError(
                    f"self-check failed at token {target} of a sequence of {len(ids)}: the gradient of "
                    f"{_blame(differences, worst)} differs from plain autograd's by {differences[worst]:.1e} "
                    f"(tolerance {tolerance:.0e}); nothing was measured. Please report the architecture"
                )
            count, largest = count + 1, max(largest, differences[worst])
    return SelfCheck(count, largest, tolerance)


def _measure_together(meter: TokenGradientMeter, sequences: list[SequenceTokens]) -> list[TokenGradients]:
    """Measure each sequence's tokens in groups, with two sequences of similar length together."""
    wider = [_with_company(s) for s in sequences]
    order = sorted(range(len(wider)), key=lambda i: max(wider[i].lengths))
    found: dict[int, TokenGradients] = {}
    for start in range(0, len(order), 2):
        pair = order[start : start + 2]
        found |= zip(pair, meter.measure_together([wider[i] for i in pair]), strict=True)
    return [found[i] for i in range(len(sequences))]


def _with_company(sequence: SequenceTokens) -> SequenceTokens:
    """Add the preceding response token to each token without another one nearby."""
    at, measured = torch.tensor(sequence.lengths), sequence.measured
    near = ((at[:, None] - at).abs() <= NEAR).sum(1) > 1
    alone = measured[~near]
    return replace(sequence, measured=torch.cat([measured, alone - 1]).clamp(min=0).unique())


def _read(found: TokenGradients, tokens: Tensor) -> list[TokenNorms]:
    """Read these tokens from the engine's results, in one copy from the device."""
    scaled = [] if found.scaled_grad_norm is None else [found.scaled_grad_norm]
    norms = [*found.act_grad_norm.T, found.param_grad_norm, *scaled, *found.module_grad_norm.values()]
    rows = torch.stack(norms, 1)[tokens.to(norms[0].device)].double().tolist()
    depth, names = found.act_grad_norm.shape[1], list(found.module_grad_norm)
    return [
        TokenNorms(
            row[:depth],
            dict(zip(names, row[depth + 1 + len(scaled) :], strict=True)),
            row[depth],
            row[depth + 1] if scaled else None,
        )
        for row in rows
    ]


def _compare(ours: TokenNorms, oracle: TokenNorms) -> dict[str, float]:
    """Return the relative differences of the norms of each layer, each module and all parameters."""
    layers = zip(ours.act_grad_norm, oracle.act_grad_norm, strict=True)
    out = {f"activations of layer {layer}": _relative(a, b) for layer, (a, b) in enumerate(layers)}
    # Modules are compared relative to the whole: the norm of a nearly unused one is rounding.
    whole = max(oracle.param_grad_norm, FLOOR)
    for name, norm in oracle.module_grad_norm.items():
        out[f"module {name or 'the model itself'}"] = abs(ours.module_grad_norm.get(name, 0.0) - norm) / whole
    out[ALL] = _relative(ours.param_grad_norm, oracle.param_grad_norm)
    if ours.scaled_grad_norm is not None:
        out[f"{ALL} in the optimizer's metric"] = _relative(ours.scaled_grad_norm, oracle.scaled_grad_norm)
    # NaN must count as the worst, but max() would skip it.
    return {name: difference if isfinite(difference) else inf for name, difference in out.items()}


def _blame(differences: dict[str, float], worst: str) -> str:
    """Return the name of the worst norm; for the norm over all parameters, of the module that differs most."""
    modules = [name for name in differences if name.startswith("module ")]
    return max(modules, key=differences.__getitem__) if worst == ALL else worst


def _relative(ours: float, reference: float) -> float:
    return abs(ours - reference) / max(reference, FLOOR)
