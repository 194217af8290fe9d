"""Check a trainer's gradient against the exact gradient of its loss, under several readings of that loss.

Eq. 2 gives −Σ_t c_t·w_t·∇ log π_t; a reading specifies c_t, or an error that gives a token another's weight. All
readings come from one pass over the batch (`TokenJacobian.vjp`), and all results from inner products by parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.gradients import Resources, TokenJacobian, Vectors
from gradscope.objective import LossSettings, batch_weights, resolve_advantages
from gradscope.policy import Policy, PolicyLike, group_settings, module_groups, optimizer_names, plain_name, read_state
from gradscope.rollouts import BatchLike, TokenBatch, read_logged

READINGS = {
    "logged": "the loss as recorded in the log",
    "token-mean": "the mean over all tokens of the batch",
    "sequence-mean": "the mean over responses of the mean over their tokens",
    "micro-batches": "the mean over micro-batches of the mean over their tokens",
    "processes": "the mean over processes of the mean over their tokens",
    "mask-late": "the mean over all tokens, each with the weight of the token before it",
    "mask-early": "the mean over all tokens, each with the weight of the token after it",
    "mask-late-2": "the mean over all tokens, each with the weight of the token two before it",
    "mask-early-2": "the mean over all tokens, each with the weight of the token two after it",
    "mask-late-3": "the mean over all tokens, each with the weight of the token three before it",
    "mask-early-3": "the mean over all tokens, each with the weight of the token three after it",
    "no-temperature": "the mean over all tokens of log π at temperature 1",
}
"""Losses that a trainer may have computed."""
FLOAT32 = 2e-3
"""Relative distance above which two float32 sums are not of the same terms."""
BFLOAT16 = torch.finfo(torch.bfloat16).eps
"""Spacing of bfloat16 numbers just above 1, 2⁻⁷."""
PASSES = 4.0
"""Largest error of a gradient from bfloat16 passes, in spacings: 2 to 3 under TRL's autocast on the embedded policy."""
ALL, OUTSIDE = "all", "outside"
"""Instead of a layer or a group: over all of them; not in a layer."""
Kind = Literal["same", "factor", "parameters", "rounding", "other"]


@dataclass(frozen=True, eq=False)
class Audit:
    """Comparison of a trainer's gradient with the exact one."""

    kind: Kind
    """same: equal to a reading's; factor: a multiple of it; parameters: a multiple except in some parameters; rounding:
    within bfloat16's error of it; other: no reading's."""
    reading: str
    """The nearest of READINGS."""
    factor: float
    """The trainer's gradient over that of the reading, for most of the parameters."""
    readings: pd.DataFrame
    """A row per reading: norm of the exact gradient, ratio of the trainer's norm to it, factor, cosine, and distance,
    ‖theirs − factor·ours‖/‖theirs‖, of the whole gradient and (typical) of half of it. For a norm alone: norm, ratio.
    """
    parameters: pd.DataFrame
    """A row per parameter, under that reading: norm (exact), ratio, cosine, distance; empty for a norm alone."""
    groups: pd.DataFrame
    """The same by layer ("outside": outside the blocks) and module group, each also over "all" of the other, with the
    number of parameters; `parts`: whether it contains a parameter of `odd`."""
    odd: tuple[str, ...]
    """Parameters whose gradient is not that multiple."""
    verdict: str
    """Verdict in words."""

    def __repr__(self) -> str:
        return self.verdict

    @property
    def parting(self) -> pd.DataFrame:
        """Where the gradients differ: the fewest rows of `groups` that cover all parameters in `odd`, by descending
        `norm`. A group is listed instead of its layers, or a layer instead of its groups, if all of them differ.
        """
        layer, group, parts = (self.groups[name] for name in ("layer", "group", "parts"))
        cells = self.groups[(layer != ALL) & (group != ALL) & (self.groups["norm"] > 0)]
        groups = _wholly(cells, "group")
        layers = _wholly(cells, "layer") & {*cells["layer"][cells["parts"] & ~cells["group"].isin(groups)]}
        told = (layer == ALL) & group.isin(groups) | (group == ALL) & layer.isin(layers)
        told |= (layer != ALL) & (group != ALL) & parts & ~group.isin(groups) & ~layer.isin(layers)
        return self.groups[told].sort_values("norm", ascending=False)


@checked
def audit(
    policy: PolicyLike,
    batch: BatchLike,
    gradient: Mapping[str, Tensor] | float,
    *,
    loss: LossSettings | None = None,
    micro_batch: int | None = None,
    processes: int | None = None,
    max_grad_norm: int | float | None = None,
    resources: Resources | None = None,
) -> Audit:
    """Compare the gradient of a trainer's step with the exact gradient of the loss on that step's batch.

    Args:
        policy: The weights before the step; load an adapter with params="adapter".
        batch: All responses of the step, in the trainer's order, with advantages, and with π_old if off-policy.
        gradient: The trainer's gradient before the optimizer step, by parameter name; or only its norm, which reveals
            less.
        loss: The trained loss; None: as recorded in the log at a path, or else the paper's.
        micro_batch: Responses per micro-batch; None: as recorded in the batch, if at all.
        processes: Number of the trainer's processes, each with an equal, consecutive part of the responses; None: as
            recorded in the batch, if at all.
        max_grad_norm: The trainer's clipping threshold, if the gradient was recorded after clipping.

    Raises:
        InputError: if names or shapes do not match the policy's, the gradient is 0 or not finite, or the batch has no
            advantages.
    """
    policy, batch, told = read_logged(policy, batch)
    loss = LossSettings.from_log(told) if loss is None else loss
    batch = replace(batch, advantages=resolve_advantages(batch))
    J = TokenJacobian(policy, batch, resources)
    parts = _parts(batch, micro_batch, processes)
    weights = _weigh(J, loss, parts)
    vectors = J.vjp(-torch.stack([*weights.values()]))
    sums = _by_name(vectors, weights)
    if (batch.temperature[batch.response_mask.any(1)] != 1).any():
        unscaled = TokenJacobian(policy, batch.at_temperature(1.0), resources)
        sums["no-temperature"] = unscaled.vjp(-weights["token-mean"][None])
    if not isinstance(gradient, Mapping):
        return _of_a_norm(float(gradient), {name: own.norm_of_sum() for name, own in sums.items()})
    theirs = _match(gradient, vectors)
    found = {name: _products(own, theirs) for name, own in sums.items()}
    counts = {name: len(own.unique()) for name, own in parts.items()}
    given = (module_groups(policy), batch, counts, max_grad_norm)
    judged = _judge(found, *given)
    if judged.kind == "other":  # only then try masks that are further off
        further = _shifted(weights["token-mean"], J, (2, 3))
        sums = _by_name(J.vjp(-torch.stack([*further.values()])), further)
        judged = _judge(found | {name: _products(own, theirs) for name, own in sums.items()}, *given)
    if lacking := len(vectors.slices) - len(theirs):
        told = f"{judged.verdict} It has no gradient for {lacking} of the policy's {len(vectors.slices)} parameters."
        return replace(judged, verdict=told)
    return judged


def gradient_of_moments(policy: Policy, before: str | Path | None, after: str | Path) -> dict[str, Tensor]:
    """Recover a step's gradient, after clipping, from AdamW's first moments before and after it.

    From m′ = β₁·m + (1 − β₁)·g; float64 tensors by the policy's names.

    Args:
        before: AdamW's state_dict, or its checkpoint, before the step; None: the run's first step.
        after: The same after the step.

    Raises:
        InputError: the states are not one step apart, or are not AdamW's.
    """
    new, old = read_state(after), None if before is None else read_state(before)
    names, settings, found = optimizer_names(policy.model, new), group_settings(new), {}
    if len(names) != len(settings):
        raise InputError(
            f"the optimizer state has {len(settings)} parameters, but the policy {len(names)}; give the state of the "
            "run that trained these parameters (an adapter's: --params adapter)"
        )
    for name, (index, own) in zip(names, settings.items(), strict=True):
        if (moments := new["state"].get(index)) is None:
            continue
        beta = own.betas[0]
        held = {} if old is None else old["state"].get(index, {})
        steps = int(moments["step"]) - int(held.get("step", 0))
        if steps != 1:
            raise InputError(
                f"the two optimizer states are {steps} steps apart at {name}, but a gradient can be recovered only "
                "between consecutive steps; give consecutive checkpoints"
            )
        first = moments["exp_avg"].double()
        found[name] = (first - beta * held["exp_avg"].double() if held else first) / (1 - beta)
    return found


def undo_clip(gradient: Mapping[str, Tensor], grad_norm: int | float) -> tuple[dict[str, Tensor], float]:
    """Return the gradient before clipping, and the factor that clipping applied; 1 if it was not clipped.

    Args:
        gradient: After clipping, by parameter name.
        grad_norm: Norm before clipping, as logged by the trainer.
    """
    norm = float(np.sqrt(sum(float(own.double().square().sum()) for own in gradient.values())))
    factor = norm / grad_norm
    if not 0 < factor < 1 - FLOAT32:
        return dict(gradient), 1.0
    return {name: own / factor for name, own in gradient.items()}, factor


def _parts(batch: TokenBatch, micro_batch: int | None, processes: int | None) -> dict[str, Int[Tensor, " B"]]:
    """Return each response's micro-batch (numbered across processes) and process, as far as known."""
    if processes is not None and not (processes > 0 and len(batch) % processes == 0):
        raise InputError(f"{len(batch)} responses do not divide among {processes} processes; give the actual number")
    rows, found = torch.arange(len(batch)), {}
    if processes is not None:
        found["processes"] = rows // (len(batch) // processes)
    elif batch.process_ids is not None:
        found["processes"] = batch.process_ids.long()
    if micro_batch is not None:
        found["micro-batches"] = rows // micro_batch
    elif batch.micro_batch_ids is not None:
        own = batch.micro_batch_ids.long()
        found["micro-batches"] = own + (own.max() + 1) * found.get("processes", torch.zeros_like(own))
    return found


def _weigh(
    J: TokenJacobian, loss: LossSettings, parts: Mapping[str, Int[Tensor, " B"]]
) -> dict[str, Float[Tensor, " K"]]:
    """Return c_t·w_t of every kept token, by reading."""
    batch, scales = replace(J.batch, loss_scales=None), J.batch.loss_scales
    known = batch_weights(J.statistics.logprob, batch, loss, num_tokens=batch.num_tokens).total
    w = J.kept(known).double()
    response = batch.response_mask.nonzero()[:, 0]
    lengths = batch.response_mask.sum(1)[response].double()
    filled = int(batch.response_mask.any(1).sum())
    readings = {} if scales is None else {"logged": w * scales.double()[response] / len(w)}
    readings |= {"token-mean": w / len(w), "sequence-mean": w / (filled * lengths)}
    for name, own in parts.items():
        part = own[response]
        counts = torch.bincount(part).double()
        if (filled := int((counts > 0).sum())) > 1:
            readings[name] = w / (counts[part] * filled)
    return {name: own.float() for name, own in (readings | _shifted(readings["token-mean"], J, (1,))).items()}


def _shifted(weights: Float[Tensor, " K"], J: TokenJacobian, shifts: Iterable[int]) -> dict[str, Float[Tensor, " K"]]:
    """Return the readings with a shifted mask: kept tokens get another token's weight, of their response, or 0."""
    response, rows = J.batch.response_mask.nonzero()[:, 0], torch.arange(len(weights))
    found = {}
    for shift in shifts:
        for way, by in (("late", shift), ("early", -shift)):
            source = (rows - by).clamp(0, len(rows) - 1)
            moved = (source == rows - by) & (response[source] == response)
            found[f"mask-{way}" + f"-{shift}" * (shift > 1)] = torch.where(moved, weights[source], 0.0)
    return found


def _by_name(vectors: Vectors, names: Iterable[str]) -> dict[str, Vectors]:
    return {name: vectors[row : row + 1] for row, name in enumerate(names)}


def _match(gradient: Mapping[str, Tensor], ours: Vectors) -> dict[str, Float[Tensor, " p"]]:
    """Return the trainer's gradient under our names, flat."""
    found = {plain_name(name, set(ours.slices)): tensor for name, tensor in gradient.items()}
    if unknown := [name for name in found if name not in ours.slices]:
        raise InputError(
            f"the gradient has {len(unknown)} names that are not parameters of the policy ({unknown[0]}); give the "
            "same model's gradient (for an adapter, --params adapter)"
        )
    if not found:
        raise InputError("the gradient has no parameters; give one tensor per parameter, by name")
    for name, tensor in found.items():
        part = ours.slices[name]
        if tensor.numel() != part.stop - part.start:
            raise InputError(f"the gradient of {name} has {tensor.numel()} entries, unlike the parameter")
        if not torch.isfinite(tensor).all():
            raise InputError(f"the gradient of {name} is not finite; give that of another step")
    return {name: tensor.flatten() for name, tensor in found.items()}


def _products(ours: Vectors, theirs: dict[str, Float[Tensor, " p"]]) -> pd.DataFrame:
    """Return inner products by parameter, in float64: own (ours), cross, other (theirs)."""
    rows = []
    for name, their in theirs.items():
        a, b = ours.rows[0, ours.slices[name]].double().cpu(), their.double().cpu()
        rows.append({"parameter": name, "own": float(a @ a), "cross": float(a @ b), "other": float(b @ b)})
    return pd.DataFrame(rows)


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted median, one of the given values: `weighted_quantiles` would interpolate with outliers."""
    order = np.argsort(values)
    place = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
    return float(values[order][min(place, len(values) - 1)])


def _distances(products: pd.DataFrame, factor: float) -> np.ndarray:
    """Return ‖theirs − factor·ours‖ over the larger of the two norms, by parameter."""
    own, cross, other = (products[name].to_numpy() for name in ("own", "cross", "other"))
    square = np.clip(other - 2 * factor * cross + factor**2 * own, 0, None)
    return np.sqrt(square / np.maximum(np.maximum(other, factor**2 * own), 1e-300))


def _summarize(products: pd.DataFrame) -> dict[str, float]:
    own, cross, other = (products[name].to_numpy() for name in ("own", "cross", "other"))
    if not own.sum():
        return {"norm": 0.0, "ratio": np.inf, "factor": np.nan, "cosine": np.nan, "distance": 1.0, "typical": 1.0}
    moved = own > 0
    factor = _median(cross[moved] / own[moved], own[moved])
    square = max(0.0, float(other.sum() - 2 * factor * cross.sum() + factor**2 * own.sum()))
    return {
        "norm": float(np.sqrt(own.sum())),
        "ratio": float(np.sqrt(other.sum() / own.sum())),
        "factor": factor,
        "cosine": float(cross.sum() / np.sqrt(own.sum() * other.sum())),
        "distance": float(np.sqrt(square / other.sum())),
        "typical": _median(_distances(products, factor)[moved], own[moved]),
    }


def _judge(
    found: dict[str, pd.DataFrame],
    homes: Mapping[str, tuple[int | None, str]],
    batch: TokenBatch,
    counts: Mapping[str, int],
    max_grad_norm: int | float | None,
) -> Audit:
    if not next(iter(found.values()))["other"].sum():
        raise InputError("the trainer's gradient is 0; give that of a step with a gradient")
    readings = pd.DataFrame([{"reading": name} | _summarize(products) for name, products in found.items()])
    fitting = readings[readings["typical"] <= FLOAT32]  # up to a factor; rounding must not choose among these
    exact = fitting[(fitting["factor"] - 1).abs() <= FLOAT32]
    best = pd.concat([exact, fitting, readings.sort_values("typical", kind="stable")]).iloc[0]
    products, factor = found[best["reading"]], float(best["factor"])
    count = max(1, counts.get("micro-batches", 1) // counts.get("processes", 1))  # that one process accumulates
    # Each of n additions rounds a partial sum by up to eps/2 of it, eps/√12 in the root mean square; partial sums grow
    # as √k, so that the total is eps·√(n/24). The limit is five times that, as cancelling micro-batches err more.
    accumulated = BFLOAT16 * np.sqrt(count)
    rounding = max(PASSES * BFLOAT16, accumulated)
    sound = best["typical"] <= FLOAT32
    parameters = products[["parameter"]].join(_tabulate(products, factor))
    # In a parameter with almost no gradient, only the rounding of larger ones remains.
    size = np.maximum(products["own"] * factor**2, products["other"])
    heavy = size > 1e-8 * products["other"].sum()
    limit = 10 * (FLOAT32 if sound else rounding)
    rounded = not sound and best["typical"] <= rounding and abs(factor - 1) <= rounding
    odd = tuple(parameters["parameter"][heavy & (parameters["distance"] > limit)]) if sound or rounded else ()
    exception = _describe(odd, parameters, factor) if odd else ""
    words = READINGS[best["reading"]]
    if rounded:
        kind: Kind = "parameters" if odd else "rounding"
        told = (
            f"The trainer's gradient differs by {100 * best['typical']:.2g} % from that of {words}. bfloat16 explains "
            f"this, in the passes (up to {100 * PASSES * BFLOAT16:.2g} %)"
        )
        summed = f" or in accumulating {count} micro-batches (up to eps·√{count} = {100 * accumulated:.2g} %)"
        told += summed * (count > 1) + f"{exception}."
    elif not sound:
        kind = "other"
        told = (
            f"The trainer's gradient matches no reading: the nearest is {words}, with a cosine of "
            f"{best['cosine']:.3f} and half of the gradient over {100 * best['typical']:.2g} % off. Passes in half "
            "precision can cause this if advantages cancel: audit a step in float32."
        )
    else:
        times = "" if abs(factor - 1) <= FLOAT32 else f"{factor:.4g} times "
        kind = "parameters" if odd else "factor" if times else "same"
        told = f"The trainer's gradient is {times}that of {words}"
        told += _explain(factor, batch, counts, best["norm"], max_grad_norm) if times else ""
        told += exception + "." + _name_others(exact["reading"], best["reading"])
    groups = _by_group(products, homes, factor, parts=heavy & (parameters["distance"] > limit))
    return Audit(kind, best["reading"], factor, readings, parameters, groups, odd, told)


def _describe(odd: tuple[str, ...], parameters: pd.DataFrame, factor: float) -> str:
    """Describe the largest of the parameters that differ."""
    worst = parameters[parameters["parameter"].isin(odd)].sort_values("norm").iloc[-1]
    return (
        f", except for {len(odd)} of {len(parameters)} parameters: at {worst['parameter']} it is "
        f"{worst['ratio'] / factor:.4g} times that, with a cosine of {worst['cosine']:.3f}"
    )


def _name_others(fitting: Iterable[str], named: str) -> str:
    """Name the other readings that fit, which this batch cannot distinguish."""
    others = [name for name in fitting if name != named]
    return f" This batch cannot distinguish {' and '.join(others)} from it." if others else ""


def _tabulate(products: pd.DataFrame, factor: float) -> pd.DataFrame:
    own, cross, other = (products[name].to_numpy() for name in ("own", "cross", "other"))
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = {"norm": np.sqrt(own), "ratio": np.sqrt(other / own), "cosine": cross / np.sqrt(own * other)}
    return pd.DataFrame(numbers | {"distance": _distances(products, factor)}, index=products.index)


def _by_group(
    products: pd.DataFrame, homes: Mapping[str, tuple[int | None, str]], factor: float, *, parts: pd.Series
) -> pd.DataFrame:
    """Make `Audit.groups`: over all layers, over all groups of a layer, and each by itself; parts: by parameter."""
    layers, groups = zip(*(homes[name] for name in products["parameter"]), strict=True)
    told = products.assign(group=groups, layer=[OUTSIDE if n is None else str(n) for n in layers], parts=parts)
    frames = []
    for one in (told.assign(layer=ALL), told.assign(group=ALL), told):
        by = one.groupby(["layer", "group"], sort=False)
        sums = by.agg(parameters=("parameter", "size"), parts=("parts", "any"))
        numbers = _tabulate(by[["own", "cross", "other"]].sum(), factor)
        frames.append(sums[["parameters"]].join(numbers).join(sums[["parts"]]).reset_index())
    return pd.concat(frames, ignore_index=True)


def _wholly(cells: pd.DataFrame, by: str) -> set[str]:
    """Return the layers or groups that differ in every cell."""
    parts = cells.groupby(by)["parts"].all()
    return {*parts.index[parts]}


def _explain(
    factor: float, batch: TokenBatch, counts: Mapping[str, int], norm: float, max_grad_norm: int | float | None
) -> str:
    """Name a known cause of a constant factor, if one fits."""
    sizes: dict[str, float] = {}
    if max_grad_norm is not None and norm > 0:
        sizes[f"the clipping to {max_grad_norm:g}"] = max_grad_norm / norm
    for name, count in counts.items():
        sizes |= {f"the number of {name}": count, f"one over the number of {name}": 1 / count}
    kept, filled = batch.num_tokens, int(batch.response_mask.any(1).sum())
    longest = int(batch.response_mask.sum(1).max())
    sizes |= {"the number of tokens, so a sum": kept, "a division by the responses": kept / filled}
    sizes["a division by responses × the longest one's length"] = kept / (filled * longest)
    near = [name for name, size in sizes.items() if abs(factor / size - 1) <= FLOAT32]
    constant = kept / (filled * factor)
    if not near and abs(constant - round(constant)) <= 1e-4 * constant and round(constant) > longest:
        near = [f"as from a division by the responses × a constant of {round(constant)}"]
    return f" ({near[0]})" if near else ""


def _of_a_norm(norm: float, known: dict[str, float]) -> Audit:
    if not (np.isfinite(norm) and norm > 0):
        raise InputError(f"the trainer's gradient norm is {norm}; give a finite one above 0")
    rows = [{"reading": name, "norm": own, "ratio": norm / own if own else np.inf} for name, own in known.items()]
    readings = pd.DataFrame(rows)
    near, first = readings[(readings["ratio"] - 1).abs() <= FLOAT32]["reading"].tolist(), readings.iloc[0]
    factor = float(readings.set_index("reading")["ratio"][near[0]] if near else first["ratio"])
    if near:
        told = f"The trainer's norm is that of {READINGS[near[0]]}; a norm alone says nothing of the direction."
        told += _name_others(near, near[0])
        return Audit("same", near[0], factor, readings, pd.DataFrame(), pd.DataFrame(), (), told)
    told = f"The trainer's norm is {factor:.4g} times that of {READINGS[first['reading']]}"
    if abs(factor - 1) <= PASSES * BFLOAT16:
        told += f": within the error of passes in bfloat16 ({100 * PASSES * BFLOAT16:.2g} %)."
        others = readings["reading"][(readings["ratio"] - 1).abs() <= PASSES * BFLOAT16]
        told += _name_others(others, first["reading"])
        return Audit("rounding", first["reading"], factor, readings, pd.DataFrame(), pd.DataFrame(), (), told)
    told += "; it matches no reading."
    return Audit("factor", first["reading"], factor, readings, pd.DataFrame(), pd.DataFrame(), (), told)
