"""Is a trainer's gradient the one that its loss has? Beside it the exact gradient, under several readings of the loss.

Eq. 2 gives −Σ_t c_t·w_t·∇ log π_t; a reading says what c_t is, or by which slip a token gets another's weight. All
readings come from one pass over the batch (`TokenJacobian.vjp`), and all that is told from inner products by parameter.
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
from gradscope.policy import Policy, PolicyLike, module_groups, optimizer_names, plain_name, read_state
from gradscope.rollouts import BatchLike, TokenBatch, read_logged

READINGS = {
    "logged": "the loss as the log says that it adds up",
    "token-mean": "the mean over all tokens of the batch",
    "sequence-mean": "the mean over responses of the mean over their tokens",
    "micro-batches": "the mean over micro-batches of the mean over their tokens",
    "processes": "the mean over processes of the mean over their tokens",
    "mask-late": "the mean over all tokens, where each has the weight of the one before it",
    "mask-early": "the mean over all tokens, where each has the weight of the one after it",
    "mask-late-2": "the mean over all tokens, where each has the weight of the second before it",
    "mask-early-2": "the mean over all tokens, where each has the weight of the second after it",
    "mask-late-3": "the mean over all tokens, where each has the weight of the third before it",
    "mask-early-3": "the mean over all tokens, where each has the weight of the third after it",
    "no-temperature": "the mean over all tokens of log π at temperature 1",
}
"""What a trainer may have added up."""
FLOAT32 = 2e-3
"""Relative distance of two sums of the same terms in float32, beyond which they are not the same."""
BFLOAT16 = torch.finfo(torch.bfloat16).eps
"""Spacing of bfloat16's numbers from 1 on, 2⁻⁷."""
PASSES = 4.0
"""Spacings by which passes in bfloat16 may put a gradient off: 2 to 3 under TRL's autocast on the embedded policy."""
ALL, OUTSIDE = "all", "outside"
"""In place of a layer or a group: over all of them; not in a layer."""
Kind = Literal["same", "factor", "parameters", "rounding", "other"]


@dataclass(frozen=True, eq=False)
class Audit:
    """How far a trainer's gradient is from the exact one."""

    kind: Kind
    """same: that of a reading; factor: a multiple of it; parameters: but for some of them; rounding: as far from it as
    bfloat16 puts it; other: none of a reading's."""
    reading: str
    """The nearest of READINGS."""
    factor: float
    """The trainer's gradient over that of the reading, as most of the parameters have it."""
    readings: pd.DataFrame
    """A row per reading: norm of the exact gradient, ratio of the trainer's norm to it, factor, cosine, and distance,
    ‖theirs − factor·ours‖/‖theirs‖, in all and (typical) of half of the gradient. Of a norm alone norm and ratio."""
    parameters: pd.DataFrame
    """A row per parameter, under that reading: norm (exact), ratio, cosine, distance; empty of a norm alone."""
    groups: pd.DataFrame
    """The same by layer ("outside": of the blocks) and module group, each also over "all" of the other, with the number
    of parameters; `parts`: with one whose gradient is not that multiple."""
    odd: tuple[str, ...]
    """Parameters whose gradient is not that multiple."""
    verdict: str
    """All of it in words."""

    def __repr__(self) -> str:
        return self.verdict

    @property
    def parting(self) -> pd.DataFrame:
        """Where the two part: the fewest rows of `groups` that hold all parameters which differ, by `norm` the largest
        first. A group stands for its layers, or a layer for its groups, where each of them parts.
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
    """Compare the gradient of a trainer's step with the exact one of the loss on that step's batch.

    Args:
        policy: the weights that the step started from; an adapter's own with params="adapter".
        batch: all responses of the step, in the trainer's order, with advantages, and with π_old where it is another.
        gradient: the trainer's, by parameter name, before the optimizer's step; or its norm alone, which tells less.
        loss: what was trained; None: what the log at a path says, else the paper's.
        micro_batch: responses of one micro-batch; None: as the batch says, if it does.
        processes: of the trainer, each with as many responses, one process's after the other's; None: as the batch
            says, if it does.
        max_grad_norm: the trainer's clipping, where the gradient is after it.

    Raises:
        InputError: for names or shapes that are not the policy's, for a gradient that is 0 or not finite, and for a
            batch without advantages.
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
    if judged.kind == "other":  # a mask may be further off, which is looked at where nothing else is found
        further = _shifted(weights["token-mean"], J, (2, 3))
        sums = _by_name(J.vjp(-torch.stack([*further.values()])), further)
        judged = _judge(found | {name: _products(own, theirs) for name, own in sums.items()}, *given)
    if lacking := len(vectors.slices) - len(theirs):
        told = f"{judged.verdict} It has no gradient of {lacking} of the policy's {len(vectors.slices)} parameters."
        return replace(judged, verdict=told)
    return judged


def gradient_of_moments(policy: Policy, before: str | Path | None, after: str | Path) -> dict[str, Tensor]:
    """Return the gradient that AdamW's first moments took in between two consecutive steps, as it was after clipping.

    From m′ = β₁·m + (1 − β₁)·g; tensors in float64, by the policy's names.

    Args:
        before: AdamW's state_dict, or its checkpoint, from which the step started; None: it was the run's first.
        after: the same after the step.

    Raises:
        InputError: the states are not one step apart, or are not AdamW's.
    """
    new, old = read_state(after), None if before is None else read_state(before)
    names, group = optimizer_names(policy.model, new), new["param_groups"][0]
    beta, found = float(group["betas"][0]), {}
    indices = [index for own in new["param_groups"] for index in own["params"]]
    for name, index in zip(names, indices, strict=True):
        if (moments := new["state"].get(index)) is None:
            continue
        held = {} if old is None else old["state"].get(index, {})
        steps = int(moments["step"]) - int(held.get("step", 0))
        if steps != 1:
            raise InputError(
                f"the two optimizer states are {steps} steps apart at {name}, and moments tell one gradient only from "
                "one step to the next; give consecutive checkpoints"
            )
        first = moments["exp_avg"].double()
        found[name] = (first - beta * held["exp_avg"].double() if held else first) / (1 - beta)
    return found


def undo_clip(gradient: Mapping[str, Tensor], grad_norm: int | float) -> tuple[dict[str, Tensor], float]:
    """Return a gradient as it was before clipping, and by how much it had been multiplied; 1 where it was not clipped.

    Args:
        gradient: after clipping, by parameter name.
        grad_norm: its norm before, as the trainer logged it.
    """
    norm = float(np.sqrt(sum(float(own.double().square().sum()) for own in gradient.values())))
    factor = norm / grad_norm
    if not 0 < factor < 1 - FLOAT32:
        return dict(gradient), 1.0
    return {name: own / factor for name, own in gradient.items()}, factor


def _parts(batch: TokenBatch, micro_batch: int | None, processes: int | None) -> dict[str, Int[Tensor, " B"]]:
    """Each response's micro-batch, among those of all processes, and its process, as far as either is known."""
    if processes is not None and not (processes > 0 and len(batch) % processes == 0):
        raise InputError(f"{len(batch)} responses do not divide among {processes} processes; give how many there were")
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
    """c_t·w_t of every kept token, by reading."""
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
    """The readings whose mask is that many tokens off: each kept token has the weight of another of its response, or
    none.
    """
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
    """The trainer's gradient by our names, flat."""
    found = {plain_name(name, set(ours.slices)): tensor for name, tensor in gradient.items()}
    if unknown := [name for name in found if name not in ours.slices]:
        raise InputError(
            f"the gradient has {len(unknown)} names that are no parameter of the policy ({unknown[0]}); give that of "
            "the same model, an adapter's with --params adapter"
        )
    if not found:
        raise InputError("the gradient holds no parameter; give one tensor for each, by its name")
    for name, tensor in found.items():
        part = ours.slices[name]
        if tensor.numel() != part.stop - part.start:
            raise InputError(f"the gradient of {name} has {tensor.numel()} numbers, the parameter another count")
        if not torch.isfinite(tensor).all():
            raise InputError(f"the gradient of {name} is not finite; give that of a sound step")
    return {name: tensor.flatten() for name, tensor in found.items()}


def _products(ours: Vectors, theirs: dict[str, Float[Tensor, " p"]]) -> pd.DataFrame:
    """Inner products by parameter, in float64: own, of ours; cross; other, of theirs."""
    rows = []
    for name, their in theirs.items():
        a, b = ours.rows[0, ours.slices[name]].double().cpu(), their.double().cpu()
        rows.append({"parameter": name, "own": float(a @ a), "cross": float(a @ b), "other": float(b @ b)})
    return pd.DataFrame(rows)


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the value that half of the weight reaches, one of those given: `weighted_quantiles` would mix the others
    with one that is far off.
    """
    order = np.argsort(values)
    place = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
    return float(values[order][min(place, len(values) - 1)])


def _distances(products: pd.DataFrame, factor: float) -> np.ndarray:
    """‖theirs − factor·ours‖ over the larger of both norms, by parameter."""
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
        raise InputError("the trainer's gradient is 0; give that of a step that moved something")
    readings = pd.DataFrame([{"reading": name} | _summarize(products) for name, products in found.items()])
    exact = readings[(readings["typical"] <= FLOAT32) & ((readings["factor"] - 1).abs() <= FLOAT32)]
    best = exact.iloc[0] if len(exact) else readings.sort_values("typical", kind="stable").iloc[0]
    products, factor = found[best["reading"]], float(best["factor"])
    count = max(1, counts.get("micro-batches", 1) // counts.get("processes", 1))  # that one process accumulates
    # Each of n additions puts a partial sum off by up to eps/2 of it, by eps/√12 in the root mean square; partial sums
    # grow as √k, so that all add up to eps·√(n/24). Five times that; it is more where micro-batches cancel.
    accumulated = BFLOAT16 * np.sqrt(count)
    rounding = max(PASSES * BFLOAT16, accumulated)
    sound = best["typical"] <= FLOAT32
    parameters = products[["parameter"]].join(_tabulate(products, factor))
    # Of a parameter with next to no gradient the rounding of larger ones is left.
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
            f"The trainer's gradient is {100 * best['typical']:.2g} % from that of {words}: as far as bfloat16 can put "
            f"it, in the passes (up to {100 * PASSES * BFLOAT16:.2g} %)"
        )
        summed = f" or in accumulating {count} micro-batches (up to eps·√{count} = {100 * accumulated:.2g} %)"
        told += summed * (count > 1) + f"{exception}."
    elif not sound:
        kind = "other"
        told = (
            f"The trainer's gradient is that of no reading: the nearest is {words}, with a cosine of "
            f"{best['cosine']:.3f} and half of the gradient over {100 * best['typical']:.2g} % off. Passes in half "
            "precision can do that where advantages cancel: look at a step in float32."
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
    """Say how the largest of the parameters that differ does."""
    worst = parameters[parameters["parameter"].isin(odd)].sort_values("norm").iloc[-1]
    return (
        f", but for {len(odd)} of {len(parameters)} parameters: at {worst['parameter']} it is "
        f"{worst['ratio'] / factor:.4g} times that, with a cosine of {worst['cosine']:.3f}"
    )


def _name_others(fitting: Iterable[str], named: str) -> str:
    """Return which readings fit as well, so that nothing tells them apart on this batch."""
    others = [name for name in fitting if name != named]
    return f" On this batch {' and '.join(others)} cannot be told from it." if others else ""


def _tabulate(products: pd.DataFrame, factor: float) -> pd.DataFrame:
    own, cross, other = (products[name].to_numpy() for name in ("own", "cross", "other"))
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = {"norm": np.sqrt(own), "ratio": np.sqrt(other / own), "cosine": cross / np.sqrt(own * other)}
    return pd.DataFrame(numbers | {"distance": _distances(products, factor)}, index=products.index)


def _by_group(
    products: pd.DataFrame, homes: Mapping[str, tuple[int | None, str]], factor: float, *, parts: pd.Series
) -> pd.DataFrame:
    """`Audit.groups`: of all layers, of all groups of a layer, and of each by itself; parts: by parameter."""
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
    """The layers or groups of which each cell parts."""
    parts = cells.groupby(by)["parts"].all()
    return {*parts.index[parts]}


def _explain(
    factor: float, batch: TokenBatch, counts: Mapping[str, int], norm: float, max_grad_norm: int | float | None
) -> str:
    """Return what is known to make a constant factor."""
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
        near = [f"as a division by the responses × a constant of {round(constant)} would make it"]
    return f" ({near[0]})" if near else ""


def _of_a_norm(norm: float, known: dict[str, float]) -> Audit:
    if not (np.isfinite(norm) and norm > 0):
        raise InputError(f"the trainer's gradient norm is {norm}; give a finite one above 0")
    rows = [{"reading": name, "norm": own, "ratio": norm / own if own else np.inf} for name, own in known.items()]
    readings = pd.DataFrame(rows)
    near, first = readings[(readings["ratio"] - 1).abs() <= FLOAT32]["reading"].tolist(), readings.iloc[0]
    factor = float(readings.set_index("reading")["ratio"][near[0]] if near else first["ratio"])
    if near:
        told = f"The trainer's norm is that of {READINGS[near[0]]}; a norm alone does not tell of its direction."
        told += _name_others(near, near[0])
        return Audit("same", near[0], factor, readings, pd.DataFrame(), pd.DataFrame(), (), told)
    told = f"The trainer's norm is {factor:.4g} times that of {READINGS[first['reading']]}"
    if abs(factor - 1) <= PASSES * BFLOAT16:
        told += f": no further off than passes in bfloat16 can put it ({100 * PASSES * BFLOAT16:.2g} %)."
        others = readings["reading"][(readings["ratio"] - 1).abs() <= PASSES * BFLOAT16]
        told += _name_others(others, first["reading"])
        return Audit("rounding", first["reading"], factor, readings, pd.DataFrame(), pd.DataFrame(), (), told)
    told += ", and no reading's."
    return Audit("factor", first["reading"], factor, readings, pd.DataFrame(), pd.DataFrame(), (), told)
