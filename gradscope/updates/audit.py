"""Check a trainer's gradient against the exact gradient of its loss, under several readings of that loss.

All results are arithmetic on inner products by parameter of the trainer's gradient with the readings' exact ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.errors import InputError, checked
from gradscope.gradients import Resources, TokenJacobian
from gradscope.objective import LossSettings, grpo_advantages, resolve_advantages, settle_loss
from gradscope.policy import Policy, PolicyLike, flat_slices, float_parameters, module_groups, plain_name
from gradscope.rollouts import BatchLike, Note, Precision, TokenBatch, read_logged
from gradscope.updates.auditing.explain import MOST, Explanation, Rest
from gradscope.updates.auditing.faults import NEEDS
from gradscope.updates.auditing.kinship import Home, find_kinship
from gradscope.updates.auditing.products import ALL, APART, CLUSTER, FLOAT32, TIGHT, by_group, summarize, tabulate
from gradscope.updates.auditing.readings import GUESSED, Reading, Readings, TokenRows, TrainedLoss
from gradscope.updates.auditing.rounded import ROUNDED
from gradscope.updates.auditing.search import RESCORED, Search
from gradscope.updates.auditing.whitened import find_whitened

EPS = {"bfloat16": torch.finfo(torch.bfloat16).eps, "float16": torch.finfo(torch.float16).eps}
"""Half precision → the spacing of its numbers just above 1."""
PASSES = 4.0
"""Largest error of a gradient from passes in half precision, in spacings: 2 to 3 of bfloat16's under TRL's autocast, on
the embedded policy."""
EPSILONS = (1e-6, 1e-4)
"""What trainers add to a group's standard deviation: the paper's code, TRL."""
FEW = 3
"""Most parts of a batch of other weights that are looked for before pairs of faults."""
BEYOND = (
    " No weights of tokens make this gradient: the best that were found leave {:.2g} % of it. So it is not the model's "
    "forward or backward pass that made it (look at attention masks, positions, weights, what is detached), or not a "
    "loss of these tokens' log-probabilities."
)
POSITIONS = "where rows are padded on the left, give position_ids of their own tokens: attention_mask.cumsum(-1) − 1"
Kind = Literal["same", "factor", "parameters", "rounding", "tokens", "other"]
NEAR = 0.9
"""Least cosine of a reading that is called near: what is left of the gradient is then less than half of it."""
ALIKE = 1.1
"""Largest ‖T − G‖² of a reading, over the least, whose rest is explained by steps beside the nearest one's."""
CAUSED = {"clip_norm", "reference"}
"""Columns of an explanation that say why parts have other weights."""
REMAINS = 0.25
"""Largest share of the distance without a rounding that may remain with it."""
CAUSES = {
    "sign": "the opposite sign",
    "clipping": "the clipping to {max_grad_norm:g}",
    "part": "denominators without that part",
    "micro-batches": "the number of micro-batches",
    "one-over-micro-batches": "one over the number of micro-batches",
    "processes": "the number of processes",
    "one-over-processes": "one over the number of processes",
    "sum": "the number of tokens, so a sum",
    "responses": "a division by the responses",
    "longest": "a division by responses × the longest one's length",
    "constant": "as from a division by the responses × a constant of {constant:.0f}",
}
"""Known causes of a constant factor."""


@dataclass(frozen=True, eq=False)
class Audit:
    """Comparison of a trainer's gradient with the exact one."""

    kind: Kind
    """same: equal to a reading's; factor: a multiple of it; parameters: a multiple except in some parameters; rounding:
    within half precision's error of it, where the trainer used that; tokens: a multiple except for the tokens, or sets
    of tokens, in `explained`; other: no reading's."""
    reading: str
    """The name of the nearest reading, as in `readings`."""
    factor: float
    """The trainer's gradient over that of the reading, for most of the parameters."""
    readings: pd.DataFrame
    """A row per reading that was tried, with its aggregation and fault: norm of the exact gradient, ratio of the
    trainer's norm to it, factor, cosine, distance, ‖theirs − factor·ours‖/‖theirs‖, of the whole gradient and (typical)
    of half of it, and the share of ‖ours‖² in parameters where theirs is factor·ours (fitting). For a norm alone: norm,
    ratio. Faults are tried if no aggregation fits."""
    parameters: pd.DataFrame
    """A row per parameter, under that reading: norm (exact), ratio, cosine, distance; empty for a norm alone."""
    groups: pd.DataFrame
    """The same by layer ("outside": outside the blocks) and module group, each also over "all" of the other, with the
    number of parameters; `parts`: whether it contains a parameter of `odd`."""
    odd: tuple[str, ...]
    """Parameters whose gradient is not that multiple."""
    verdict: str
    """Verdict in words."""
    aggregation: str
    """How the reading averages over tokens: one of AGGREGATIONS."""
    odd_kind: str | None = None
    """The kind of parameters that `odd` are, and no others, such as a group or layer (see `kinship`); None: none."""
    fault: str | None = None
    """What the reading does wrong: one of FAULTS, or two, joined by "+"; None: nothing."""
    part: int | None = None
    """Index of the response, micro-batch or process that is missing; None: none is."""
    value: float | None = None
    """The number of the reading: a coefficient, a bound, or how many parts or responses; None: it has none."""
    remedies: tuple[str, ...] = ()
    """What to do about what the reading does wrong."""
    explained: pd.DataFrame = field(default_factory=pd.DataFrame)
    """A row per token, or set of tokens, of another weight than the reading's: see `explain`. Empty if not needed, or
    not found."""
    unseen: tuple[str, ...] = ()
    """Faults of NEEDS that change nothing on this batch, so that no gradient of it can show them."""
    refused: tuple[str, ...] = ()
    """Faults of passes that were not tried, since the model does not take them."""
    hidden: float | None = None
    """Largest share of the gradient's norm that a fault may have without being seen; None for a norm alone."""
    exact: Callable[[], dict[str, Tensor]] | None = None
    """Computes the exact gradient of the reading, times the factor, flat by parameter; None for a norm alone."""
    cause: str | None = None
    """Cause of the factor: one of CAUSES; None: 1, or unknown."""
    also: tuple[str, ...] = ()
    """Other readings with the same gradient on this batch."""
    norm_ratio: float = 1.0
    """The norm of the trainer's gradient over the exact one's: of the logged loss or, if its denominators are not
    logged, of the reading without its fault; for a norm alone, of the first reading."""
    beyond_tokens: float | None = None
    """Of a gradient that is no reading's: what is left of it, over its norm, at the best weights of tokens, where that
    shows that passes or another loss made it; None: it does not, or was not tried."""
    precision: Precision | None = None
    """Of the trainer's passes; None: unknown."""
    notes: tuple[Note, ...] = ()
    """What the log itself gives to doubt: the batch's notes."""

    def __repr__(self) -> str:
        return "\n".join((*(f"note: {note}" for note in self.notes), self.verdict))

    @property
    def blind(self) -> str:
        """What the comparison cannot show, in words."""
        least = None if self.hidden is None else f"{100 * self.hidden:.2g} %"
        told = [] if least is None else [f"Faults below {least} of the gradient's norm are invisible."]
        if lacking := "; ".join(NEEDS[name] for name in self.unseen):
            told.append(f"This batch cannot show faults that need {lacking}.")
        if self.refused:
            told.append(f"The model does not take the passes of {', '.join(self.refused)}, so these were not tried.")
        return " ".join(told)

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
        batch: All responses of the step, in the trainer's order, with advantages, and with π_old if off-policy. Its
            `run` tells the precision of the trainer's passes, where the gradient's own numbers do not show it.
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
    loss = TrainedLoss.of(LossSettings.from_log(told) if loss is None else loss)
    batch = settle_loss(batch, loss)
    if not loss.is_whole:
        loss = loss if loss.advantage_eps is not None else replace(loss, advantage_eps=_show_eps(batch))
        if not 0 <= loss.advantage_eps < np.inf:
            raise InputError(f"advantage_eps is {loss.advantage_eps}; give a finite number, 0 or more")
        batch = replace(batch, advantages=resolve_advantages(batch, eps=loss.advantage_eps))
    run, slices = batch.run, flat_slices(policy.model)
    theirs = _match(gradient, slices) if isinstance(gradient, Mapping) else None
    if theirs is not None and not any(own.any() for own in theirs.values()):
        raise InputError("the trainer's gradient is 0; give that of a step with a gradient")
    precision = (None if theirs is None else _show_precision(theirs)) or run.precision
    rows = TokenRows.of(batch, micro_batch, processes)
    J = TokenJacobian(policy, batch, resources)
    readings = Readings(J, loss, rows, batch.response_mask, batch.positions(), batch)
    trains = run.trains if any(map(run.trains, slices)) else slices.__contains__  # by names of another model
    search = Search(readings, theirs, trains)
    about = {"precision": precision, "notes": batch.notes, "unseen": _unseen(readings)}
    if theirs is None:
        judged = _of_a_norm(float(gradient), search.found, precision)
        if judged.kind == "factor":
            search.try_normed(search.distinct(judged.aggregation)[0])
            judged = _of_a_norm(float(gradient), search.found, precision)
        return replace(judged, **about)
    counts = {name: len(own.unique()) for name, own in rows.parts.items()}
    shapes = {name: tuple(own.shape) for name, own in float_parameters(policy.model)}
    given = (module_groups(policy), shapes, batch, counts, max_grad_norm, precision)
    judged = _judge(search.found, *given)
    distinct = search.distinct(judged.aggregation if batch.loss_scales is None else "logged")
    rests = _Rests(search, _rounding(precision, counts))
    whitened = partial(search.try_found, find_whitened)
    single = search.try_faults, search.try_numbers, search.try_retokenised, whitened, search.try_passes
    for attempt in (*single, search.try_pairs):
        settled = judged.kind not in ("other", "rounding") and _is_tight(judged.readings).any()
        if settled or (judged.kind != "other" and attempt != search.try_faults):
            break
        if attempt == search.try_pairs:
            judged = rests.explain(judged, FEW)
        if judged.kind != "tokens" and (search.screens or attempt == search.try_faults):
            attempt(distinct)
            judged = _judge(search.found, *given)
    about["precision"] = precision = ROUNDED.get(judged.fault, precision)
    loose = precision not in EPS and not _is_tight(judged.readings).any()
    if judged.kind == "other" or (loose and judged.kind != "tokens"):
        judged = rests.explain(judged)
    if judged.kind == "other" and search.screens:
        for attempt in (search.try_packed, search.try_padded):
            if judged.kind == "other":
                attempt(distinct)
                judged = _judge(search.found, *given)
    if judged.kind == "parameters" and search.screens:
        search.try_passes(distinct, forward=False)
        judged = _judge(search.found, *given)
    loose = loose and not _is_tight(judged.readings).any()
    guessed = judged.aggregation in GUESSED
    same = operator.attrgetter("aggregation", "fault", "part", "value")
    reading = next(own for own in search.found if same(own) == same(judged))
    about["exact"] = search.recall(reading, judged.factor)
    rounded = judged.kind == "rounding" or (judged.kind in ("tokens", "other") and precision in EPS)
    about["hidden"] = (
        _rounding(precision, counts) if rounded else FLOAT32 if loose and judged.kind != "tokens" else TIGHT
    )
    sound = Reading("logged" if batch.loss_scales is not None else distinct[0] if guessed else judged.aggregation)
    ratio = summarize(search.found[sound])["ratio"]
    verdict = f"{judged.verdict} Its norm is {ratio:.4g} times the exact one of {sound}."
    if lacking := sum(name not in theirs and trains(name) for name in slices):
        verdict += f" It has no gradient for {lacking} of the policy's {len(slices)} parameters."
    if judged.kind == "other" and (places := _strange_places(policy, theirs, about["exact"])):
        verdict += f" Tokens stand at positions that the batch's do not reach ({places}), as if padding were counted."
        judged = replace(judged, remedies=(*judged.remedies, POSITIONS))
    if judged.kind == "other" and search.screens and len(theirs) == len(slices) and precision not in EPS:
        about["beyond_tokens"] = beyond = search.find_beyond()
        verdict += "" if beyond is None else BEYOND.format(100 * beyond)
    return replace(judged, verdict=verdict, norm_ratio=ratio, refused=tuple(search.refused), **about)


def _strange_places(
    policy: Policy, theirs: Mapping[str, Tensor], exact: Callable[[], Mapping[str, Tensor]]
) -> str | None:
    """Return the rows of a table of learned positions where the trainer's gradient is not 0 and the exact one is."""
    words, names = policy.model.get_input_embeddings(), dict(policy.model.named_modules())
    for name, table in names.items():
        weight = f"{name}.weight"
        if not isinstance(table, nn.Embedding) or table is words or weight not in theirs:
            continue
        moved, own = (g.cpu().view(table.weight.shape).any(1) for g in (theirs[weight], exact()[weight]))
        if len(strange := (moved & ~own).nonzero()[:, 0]):
            return f"{int(strange.min())} to {int(strange.max())}"
    return None


def _unseen(readings: Readings) -> tuple[str, ...]:
    """Return the faults of NEEDS that the batch cannot show."""
    batch = readings.J.batch
    inside = batch.attention_mask & (batch.positions() >= 0)
    shown = {
        "no-temperature": lambda: readings.scales,
        "mask-ignored": lambda: bool((inside & ~batch.response_mask).any()),
        "retokenised": lambda: any(old != new for old, new in readings.encoded_again("retokenised")),
    }
    other = () if not readings.loss.is_whole else ("no-clip", "no-kl", "advantages-centred")  # which it has not
    other += () if readings.loss.is_sampled else ("old-recomputed",)
    names = (name for name in NEEDS if name not in other)
    return tuple(name for name in names if not (shown[name]() if name in shown else readings.tells(name)))


class _Rests:
    """What the nearest readings leave of the trainer's gradient."""

    def __init__(self, search: Search, rounding: float) -> None:
        """rounding: largest relative error of a gradient in the trainer's half precision; 0: it is not in that."""
        self.search, self.rounding, self.floor = search, rounding, max(TIGHT, rounding)
        self.known: dict[Reading, Rest] = {}

    def explain(self, judged: Audit, most: int | None = None) -> Audit:
        """Return the verdict with what explains the rest, if few tokens or parts do; most: parts alone, and so many."""
        if not self.search.screens:
            return judged
        off = {own: summarize(p)["distance"] for own, p in self.search.found.items() if RESCORED.isdisjoint(own.faults)}
        nearest, distinct = sorted(off, key=off.get), self.search.distinct("token-mean")
        plain = [own for own in nearest if own.name in distinct]
        # A fault beside a part is a pair.
        wanted = dict.fromkeys((*plain, nearest[0]) if most is None else plain)
        rests = [rest for rest in (self._of(own, off[own]) for own in wanted) if rest]
        if any(rest.even for rest in rests):
            return judged
        parts = [(rest.reading, rest.by_parts(most or max(MOST, len(rest.J.batch) // 2))) for rest in rests]
        known = [pair for pair in parts if pair[1] is not None]
        if known:
            # What has a cause, then what leaves nothing, then the fewest, then averages that the log tells.
            averages = [reading.aggregation for reading, _ in known]
            ranks = [
                (CAUSED.isdisjoint(own.rows), own.left > self.floor, len(own.rows), name in GUESSED, name != "logged")
                for name, (_, own) in zip(averages, known, strict=True)
            ]
            reading, found = known[ranks.index(min(ranks))]
            return _add(judged, reading, found)
        if most is None and rests:
            best, fewest = None, MOST + 1
            for rest in self._bases(rests):
                if best is not None and rest.reading.faults:
                    break
                if (found := rest.by_decay() or rest.by_steps(fewest - 1)) is not None:
                    best, fewest = (rest.reading, found), len(found.rows)
            return judged if best is None else _add(judged, *best)
        return judged

    def _bases(self, rests: Sequence[Rest]) -> list[Rest]:
        """Return what is explained by steps: those of the nearest readings, and of one of which few responses depart.

        A reading of parts that the log does not tell is behind the others, and one with a fault is last.
        """
        sound = [rest for rest in rests if not rest.reading.faults]
        least = min(rest.square for rest in sound or rests)
        found = [rest for rest in sound if rest.square <= ALIKE * least]
        if sound and not self.rounding:  # which changes the weights of all responses, so that no reading has few
            found.append(min(sound, key=lambda rest: rest.spread))
        found += [rest for rest in rests if rest.reading.faults]
        return sorted(
            dict.fromkeys(found), key=lambda rest: (bool(rest.reading.faults), rest.reading.aggregation in GUESSED)
        )

    def _of(self, reading: Reading, distance: float) -> Rest | None:
        """Return the rest of a reading; None: it is within half precision's error, so perhaps not of a few tokens."""
        if self.rounding and distance < 3 * self.floor:
            return None
        if reading not in self.known:
            self.known[reading] = Rest(self.search, reading, self.floor)
        return self.known[reading]


def _add(judged: Audit, reading: Reading, found: Explanation) -> Audit:
    """Return the verdict with an explanation."""
    times = "" if abs(found.factor - 1) <= FLOAT32 else f"{found.factor:.4g} times "
    told = f"The trainer's gradient is {times}that of {reading}{', but ' if found.words else ''}{found.words}."
    told += f" This leaves {100 * found.left:.2g} % of it."
    where = {"aggregation": reading.aggregation, "fault": reading.fault, "part": reading.part, "value": reading.value}
    remedies = (*reading.remedies, *filter(None, (found.remedy,)))
    where |= {"remedies": remedies, "explained": found.rows, "factor": found.factor}
    return replace(judged, kind="tokens", reading=reading.name, verdict=told, odd=(), cause=None, **where)


def _match(gradient: Mapping[str, Tensor], slices: Mapping[str, slice]) -> dict[str, Float[Tensor, " p"]]:
    """Return the trainer's gradient under our names, flat."""
    found = {plain_name(name, set(slices)): tensor for name, tensor in gradient.items()}
    if unknown := [name for name in found if name not in slices]:
        raise InputError(
            f"the gradient has {len(unknown)} names that are not parameters of the policy ({unknown[0]}); give the "
            "same model's gradient (for an adapter, --params adapter)"
        )
    if not found:
        raise InputError("the gradient has no parameters; give one tensor per parameter, by name")
    for name, tensor in found.items():
        part = slices[name]
        if tensor.numel() != part.stop - part.start:
            raise InputError(f"the gradient of {name} has {tensor.numel()} entries, unlike the parameter")
        if not torch.isfinite(tensor).all():
            raise InputError(f"the gradient of {name} is not finite; give that of another step")
    return {name: tensor.flatten() for name, tensor in found.items()}


def _show_eps(batch: TokenBatch) -> float:
    """Return what is added to the standard deviation in the batch's advantages, as far as they are GRPO's."""
    if batch.advantages is None or batch.rewards is None or not batch.rewards.isfinite().all():
        return EPSILONS[0]
    own = batch.advantages[batch.response_mask].double()
    rows = batch.response_mask.nonzero()[:, 0]

    def error(eps: float) -> float:
        return float((grpo_advantages(batch.rewards.double(), batch.group_ids, eps=eps)[rows] - own).abs().nanmedian())

    return min(EPSILONS, key=error)


def _show_precision(gradient: Mapping[str, Tensor]) -> Precision | None:
    """Return the half precision that most of a gradient is in, by its dtype or its numbers; None if in neither."""
    whole = sum(own.numel() for own in gradient.values())
    for name in EPS:
        dtype = getattr(torch, name)
        inside = [
            own for own in gradient.values() if own.dtype == dtype or torch.equal(own, own.to(dtype).to(own.dtype))
        ]
        # A few numbers may be so by chance.
        if 2 * sum(own.numel() for own in inside) > whole and sum(int(own.count_nonzero()) for own in inside) >= 16:
            return name
    return None


def _judge(
    found: Mapping[Reading, pd.DataFrame],
    homes: Mapping[str, Home],
    shapes: Mapping[str, Sequence[int]],
    batch: TokenBatch,
    counts: Mapping[str, int],
    max_grad_norm: int | float | None,
    precision: Precision | None,
) -> Audit:
    names = [{"reading": r.name} | {n: getattr(r, n) for n in ("aggregation", "fault", "part", "value")} for r in found]
    readings = pd.DataFrame([own | summarize(p) for own, p in zip(names, found.values(), strict=True)])
    readings["part"] = readings["part"].astype("Int64")
    best, among = _choose(readings, _rounding(precision, counts))
    reading, products, factor = [*found][best.name], [*found.values()][best.name], float(best["factor"])
    precision = ROUNDED.get(reading.fault, precision)
    spacing, count, rounding = EPS.get(precision, 0.0), _count_micro_batches(counts), _rounding(precision, counts)
    sound = among == "fitting"
    parameters = products[["parameter"]].join(tabulate(products, factor))
    # In a parameter with almost no gradient, only the rounding of larger ones remains.
    size = np.maximum(products["own"] * factor**2, products["other"])
    heavy = size > 1e-8 * products["other"].sum()
    different = heavy & (parameters["distance"] > APART * (FLOAT32 if sound else rounding))
    odd = tuple(parameters["parameter"][different]) if among != "none" else ()
    known = parameters["parameter"][heavy].tolist()
    kin = find_kinship(odd, known, homes, shapes) if odd and among != "none" else None
    exception = _describe(odd, parameters, factor, None if kin is None else kin.name) if odd else ""
    cause, also = None, ()
    if among == "rounding":
        kind: Kind = "parameters" if odd else "rounding"
        told = (
            f"The trainer's gradient differs by {100 * best['typical']:.2g} % from that of {reading}. {precision} "
            f"explains this, in the passes (up to {100 * PASSES * spacing:.2g} %)"
        )
        accumulated = 100 * spacing * np.sqrt(count)
        summed = f" or in accumulating {count} micro-batches (up to eps·√{count} = {accumulated:.2g} %)"
        told += summed * (count > 1) + f"{exception}."
    elif among == "half":
        kind = "rounding"
        told = (
            f"The trainer's gradient is that of {reading}: it differs by {100 * best['typical']:.2g} % from that, less "
            f"than the spacing of {precision}'s numbers ({100 * spacing:.2g} %)."
        )
    elif among == "none":
        kind = "other"
        told = "The trainer's gradient matches no reading: "
        if best["cosine"] >= NEAR:
            told += f"the nearest is {reading}, with a cosine of {best['cosine']:.3f} and half of the gradient over "
            told += f"{100 * best['typical']:.2g} % off."
        else:
            told += f"the cosine with the nearest is {best['cosine']:.3f}, so that none says anything of it."
        if spacing:
            told += f" Passes in {precision} can cause this if advantages cancel: audit a step in float32."
    else:
        times = "" if abs(factor - 1) <= FLOAT32 else f"{factor:.4g} times "
        kind = "parameters" if odd else "factor" if times else "same"
        cause, words = _explain(factor, reading, batch, counts, best["norm"], max_grad_norm) if times else (None, "")
        like = (readings["fitting"] >= 0.5) & ((readings["factor"] - factor).abs() <= FLOAT32 * abs(factor))
        also = [own for own, alike in zip(found, like, strict=True) if alike and own != reading]
        told = f"The trainer's gradient is {times}that of {reading}{words}{exception}.{_name_others(also)}"
        told += f" {kin.words}" if kin is not None and kin.words else ""
    groups = by_group(products, homes, factor, parts=different & bool(odd))
    numbers = (factor, readings, parameters, groups, odd, told)
    where = {"fault": reading.fault, "part": reading.part, "cause": cause, "also": tuple(own.name for own in also)}
    remedies = (*reading.remedies, *filter(None, (kin and kin.remedy,))) if kind != "other" else ()
    where |= {"value": reading.value, "remedies": remedies, "odd_kind": kin and kin.name}
    return Audit(kind, reading.name, *numbers, reading.aggregation, **where)


def _count_micro_batches(counts: Mapping[str, int]) -> int:
    """Return how many micro-batches one process accumulates."""
    return max(1, counts.get("micro-batches", 1) // counts.get("processes", 1))


def _rounding(precision: Precision | None, counts: Mapping[str, int]) -> float:
    """Return the largest relative error of a gradient in half precision: of the passes or of accumulation; else 0.

    Each of n additions rounds a partial sum by up to eps/2 of it, eps/√12 in the root mean square; partial sums grow as
    √k, so that the total is eps·√(n/24). The limit is five times that, as cancelling micro-batches err more.
    """
    return EPS.get(precision, 0.0) * max(PASSES, np.sqrt(_count_micro_batches(counts)))


def _choose(
    readings: pd.DataFrame, rounding: float
) -> tuple[pd.Series, Literal["fitting", "rounding", "half", "none"]]:
    """Return the row of the reading that explains the gradient best, and how it does.

    A reading fits if the gradient is a multiple of its own in half of it, or equal to it in some parameters and far
    from it in all others. Rounding must not choose among those that fit, nor a fault over its absence.
    """
    one = (readings["factor"] - 1).abs()
    half, some = readings["fitting"] >= 0.5, (readings["fitting"] >= CLUSTER) & (readings["factor"] == 1)
    tight = _is_tight(readings)
    rounded = (readings["typical"] <= rounding) & (one <= rounding)
    # A reading of rounded logits, whose rounding is made again but for its order, leaves less than a spacing,
    # and little of what is left without it.
    spacings = readings["fault"].map(ROUNDED).map(EPS)
    away = readings.loc[readings["fault"].isna(), "typical"].min()
    again = (readings["typical"] <= spacings) & (readings["typical"] <= REMAINS * away) & (one <= spacings)
    plain, simple = readings["fault"].isna(), readings["value"].isna() & (readings["fault"].str.count(r"\+") != 1)
    for among, fitting in (
        ("fitting", (readings["distance"] <= TIGHT) & (one <= FLOAT32)),
        ("fitting", tight & (one <= FLOAT32)),
        ("fitting", tight),
        ("fitting", half & (one <= FLOAT32)),
        ("fitting", half),
        ("fitting", some),
        ("rounding", rounded & plain),
        ("half", again),
        ("rounding", rounded & simple),
        ("none", readings["part"].isna() & simple & spacings.isna()),
    ):
        if fitting.any():
            rows = readings[fitting]
            if among == "fitting":  # rather one without a fitted number
                return rows.iloc[int(rows["value"].isna().to_numpy().argmax())], among
            return rows.sort_values("typical", kind="stable").iloc[0], among
    raise AssertionError("a reading without a missing part was tried")


def _is_tight(readings: pd.DataFrame) -> pd.Series:
    """Return which readings leave nothing but float32's rounding: in half of the gradient, or where it is theirs."""
    cluster = (readings["fitting"] >= CLUSTER) & (readings["fitting"] < 0.5) & (readings["factor"] == 1)
    return (readings["typical"] <= TIGHT) | cluster


def _wholly(cells: pd.DataFrame, by: str) -> set[str]:
    """Return the layers or groups that differ in every cell."""
    parts = cells.groupby(by)["parts"].all()
    return {*parts.index[parts]}


def _describe(odd: tuple[str, ...], parameters: pd.DataFrame, factor: float, kind: str | None) -> str:
    """Describe the parameters that differ, by their kind and the largest of them."""
    worst = parameters[parameters["parameter"].isin(odd)].sort_values("norm").iloc[-1]
    which = f"{len(odd)} of {len(parameters)} parameters"
    if kind is not None:
        which = f"all parameters of one kind, {kind}, and no others ({which})"
    told = f", except for {which}: at {worst['parameter']} it is "
    if not worst["ratio"]:
        return f"{told}0"
    return f"{told}{worst['ratio'] / abs(factor):.4g} times as large as that, with a cosine of {worst['cosine']:.3f}"


def _name_others(readings: Sequence[Reading]) -> str:
    """Name the other readings that fit, which this batch cannot distinguish."""
    return f" On this batch, the same is that of {'; of '.join(map(str, readings))}." if readings else ""


def _explain(
    factor: float,
    reading: Reading,
    batch: TokenBatch,
    counts: Mapping[str, int],
    norm: float,
    max_grad_norm: int | float | None,
) -> tuple[str | None, str]:
    """Return the known cause of a constant factor that fits, if one does, and words for it."""
    if not factor:
        return None, ""
    sizes: dict[str, float] = {"sign": -1.0}
    if max_grad_norm is not None and norm > 0:
        sizes["clipping"] = max_grad_norm / norm
    kept, filled = batch.num_tokens, int(batch.response_mask.any(1).sum())
    longest = int(batch.response_mask.sum(1).max())
    if reading.fault == "response-missing":
        own = int(batch.response_mask[reading.part].sum())
        sizes["part"] = kept / (kept - own) if reading.aggregation == "token-mean" else filled / (filled - 1)
    for name, count in counts.items():
        sizes |= {name: count, f"one-over-{name}": 1 / count}
    sizes |= {"sum": kept, "responses": kept / filled, "longest": kept / (filled * longest)}
    near = [name for name, size in sizes.items() if abs(factor / size - 1) <= FLOAT32]
    constant = kept / (filled * factor)
    if not near and abs(constant - round(constant)) <= 1e-4 * constant and round(constant) > longest:
        near = ["constant"]
    if not near:
        return None, ""
    return near[0], f" ({CAUSES[near[0]].format(max_grad_norm=max_grad_norm, constant=constant)})"


def _of_a_norm(norm: float, found: Mapping[Reading, pd.DataFrame], precision: Precision | None) -> Audit:
    if not (np.isfinite(norm) and norm > 0):
        raise InputError(f"the trainer's gradient norm is {norm}; give a finite one above 0")
    norms = {reading: float(np.sqrt(products["own"].sum())) for reading, products in found.items()}
    rows = [{"reading": r.name, "norm": own, "ratio": norm / own if own else np.inf} for r, own in norms.items()]
    readings, passes = pd.DataFrame(rows), PASSES * EPS.get(precision, 0.0)
    away = (readings["ratio"] - 1).abs()
    first = next(iter(norms))
    told = f"The trainer's norm is {readings['ratio'][0]:.4g} times that of {first}"
    kind: Kind = "factor"
    reading, like = first, away < 0
    if (equal := away <= FLOAT32).any():
        kind, reading, like = "same", [*norms][int(equal.idxmax())], equal
        told += "." if reading is first else f", and equal to that of {reading}."
        told += " A norm alone says nothing of the direction."
    elif away[0] <= passes:
        kind, like = "rounding", away <= passes
        told += f": within the error of passes in {precision} ({100 * passes:.2g} %)."
    else:
        told += "; it matches no reading."
    also = [own for own, alike in zip(norms, like, strict=True) if alike and own != reading]
    factor = float(readings.set_index("reading")["ratio"][reading.name])
    empty = (pd.DataFrame(), pd.DataFrame(), ())
    told += _name_others(also)
    where = {"also": tuple(own.name for own in also), "norm_ratio": float(readings["ratio"][0])}
    return Audit(kind, reading.name, factor, readings, *empty, told, reading.aggregation, **where)
