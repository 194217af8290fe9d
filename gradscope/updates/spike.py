"""Explain a step whose gradient norm is out of line: the tokens that made it, and what would have kept it in line.

The step's gradient is G = −(1/N) Σ_t w_t·g_t with g_t = ∇ log π(o_t) and w_t = −N · ∂loss/∂ log π(o_t), over the N kept
tokens of all processes. A token's share is c_t = −w_t⟨g_t, G⟩/(N‖G‖²): shares sum to 1, may be negative, and exceed 1
where large terms cancel. A share is not the norm's drop without the token, so that norm is computed from what remains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from math import isfinite, nan
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients import TokenJacobian, Vectors
from gradscope.objective import WEIGHTINGS, TokenWeights, token_weights
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.24, "clip_ratio_c": 10.0}
"""The clips of GRPO (arXiv:2505.12929), tried beside the registry's weightings."""
BEFORE = 12
"""Number of preceding tokens of the response that are shown with a named token."""
NAMED = 8
"""Most tokens named for their share, and as many for the size of their term."""
TOGETHER = (1, 2, 4, 8, 16)
"""Numbers of tokens that are left out together, until the norm is in line."""
SEVERAL = 4
"""Number of tokens, all of one response, from which the whole response is left out instead."""
LEFT = 0.1
"""A weighting removes tokens if it leaves at most this share of their Σ|w|."""
TRIED = 8
"""Most weightings whose norm is computed."""
Mask = Bool[np.ndarray, " N"]


@dataclass(frozen=True, eq=False)
class SpikedStep:
    """The tokens of a step over all processes, and this process's Jacobian of its own."""

    jacobian: TokenJacobian
    table: pd.DataFrame
    """A row per kept token of all processes, in the Jacobian's order: the columns of `tabulate_step`."""
    decode: Callable[[Sequence[int]], str]
    """Text of token ids."""
    first: int = 0
    """The first of this process's rows."""
    processes: Processes = ALONE

    @property
    def own(self) -> slice:
        """This process's rows."""
        return slice(self.first, self.first + self.jacobian.num_tokens)

    @property
    def weights(self) -> Float[np.ndarray, " N"]:
        return self.table["weight"].to_numpy(np.float64, copy=True)

    def gradient(self, weights: Float[np.ndarray, " N"]) -> Vectors:
        """Return −(1/N) Σ_t w_t·g_t over all processes' tokens; responses without a weight are not passed through."""
        J, sums = self.jacobian.alone(), Vectors.zeros(self.jacobian.model, 1)
        spread = J.spread(torch.from_numpy(weights[self.own] / -len(weights)))
        if len(live := spread.any(1).nonzero()[:, 0]):
            part = J.select(live)
            sums = part.vjp(part.kept(spread[live])[None])
        self.processes.sum(sums.rows)
        return sums

    def norm(self, weights: Float[np.ndarray, " N"]) -> float:
        return float(self.gradient(weights).products().sqrt())

    def along(self, direction: Vectors) -> Float[np.ndarray, " N"]:
        """Return each token's ⟨g_t, v⟩; NaN for a model that computes below float32, where it would be rounding."""
        try:
            own = self.jacobian.jvp(direction).logprob[0].double().tolist()
        except InputError:
            own = [nan] * self.jacobian.num_tokens
        return np.array(self.processes.gather(own))

    def terms(self, tokens: np.ndarray, direction: Vectors | None) -> Float[np.ndarray, "2 n"]:
        """Return ‖g_t‖ and ⟨g_t, v⟩ of some tokens, by a backward pass each."""
        found = torch.zeros(2, len(tokens), dtype=torch.float64)
        rows = self.jacobian.batch.response_mask.nonzero()[:, 0]
        mine = range(len(self.table))[self.own]
        for place, token in enumerate(tokens):
            if token in mine:
                row = int(rows[own := int(token) - mine.start])
                one = (rows == row).double().nonzero()[:, 0] == own
                vector = self.jacobian.select([row]).alone().vjp(one.double()[None]).rows[0]
                found[0, place] = vector.norm()
                found[1, place] = nan if direction is None else vector @ direction.rows[0]
        return self.processes.sum(found).numpy()


@dataclass(frozen=True, eq=False)
class NonFinite:
    """What is not finite first, of weights, log π, w_t and g_t."""

    kind: Literal["weights", "log π", "w", "gradient", "precision"]
    """precision: nothing, in float32; it is the trainer's precision that overflows."""
    words: str
    tokens: Mask
    """Where; of weights: nowhere."""


@dataclass(frozen=True, eq=False)
class Spike:
    """What makes a step's gradient norm; see the module."""

    norm: float
    """The trainer's gradient norm before clipping; may be infinite or NaN."""
    line: float
    """Largest norm that counts as in line."""
    nonfinite: NonFinite | None
    """What is not finite first; None: the norm is finite."""
    shares: Float[np.ndarray, " N"]
    """c_t of each token; NaN: unknown."""
    tokens: pd.DataFrame
    """The tokens largest by share and by size, by descending |c_t|: the step's columns, token (its row there), text,
    before (the text before it), prob, ratio, gradient_share c_t, and term_norm ‖w_t·g_t‖/N."""
    without: pd.DataFrame
    """A row per set of tokens left out: what, tokens, gradient_share, and the norm of what remains, up to the first set
    that brings it in line."""
    left_out: list[Mask]
    """The tokens of each of these sets."""
    remedies: pd.DataFrame
    """A row per weighting of the registry that leaves at most a tenth of the culprits' Σ|w|: weighting, left (that
    share), and the norm under it. `clip` is GRPO's loss with its clips."""

    @property
    def explained(self) -> float:
        """Σ_t c_t: 1 if the tokens' weights are those of the trainer's gradient; NaN if shares are unknown."""
        return float(self.shares.sum())

    @property
    def found(self) -> bool:
        """Whether leaving out the last set of `without` brings the norm in line."""
        return bool(len(self.without)) and self.without["norm"].iloc[-1] <= self.line

    @property
    def culprits(self) -> Mask:
        """The smallest set found that brings the norm in line without it; none if there is no such set."""
        return self.left_out[-1] if self.found else np.zeros(len(self.shares), dtype=bool)


def tabulate_step(
    batch: TokenBatch,
    weights: TokenWeights,
    logprob: Float[Tensor, "B S"],
    entropy: Float[Tensor, "B S"] | None = None,
    rewards: Float[Tensor, " B"] | None = None,
) -> pd.DataFrame:
    """Return a row per kept token, as in the token table: response, group, position, token_id, logprob, entropy,
    old_logprob, ref_logprob, advantage, policy_weight, weight and, if known, reward and loss_scale; NaN: unknown."""
    mask = batch.response_mask
    per_response = {"response": torch.arange(len(batch)), "group": batch.group_ids}
    per_response |= {"reward": rewards, "loss_scale": batch.loss_scales}
    per_token = {"position": batch.positions(), "token_id": batch.input_ids, "logprob": logprob, "entropy": entropy}
    per_token |= {"old_logprob": batch.old_logprobs, "ref_logprob": batch.ref_logprobs, "advantage": batch.advantages}
    per_token |= {"policy_weight": weights.policy, "weight": weights.total}
    unknown = torch.full(mask.shape, nan)
    columns = {n: values[:, None].expand_as(mask) for n, values in per_response.items() if values is not None}
    columns |= {name: unknown if values is None else values for name, values in per_token.items()}
    return pd.DataFrame({name: values.detach().cpu()[mask].numpy() for name, values in columns.items()})


def explain_spike(step: SpikedStep, norm: float, *, line: float, direction: Vectors | None = None) -> Spike:
    """Explain a step's gradient norm by its tokens.

    It costs a jvp, a backward pass through a response for each named token, and one through the batch for each set of
    tokens left out (at most seven) and each weighting tried (at most eight).

    Args:
        step: its tokens, at the weights before the step.
        norm: the trainer's gradient norm before clipping.
        line: largest norm that counts as in line, such as three times the median of the steps before.
        direction: the trainer's own gradient over its norm; None: that of the tokens' weights.

    Raises:
        InputError: a process has no kept token.
    """
    weights = step.weights
    nonfinite = None if isfinite(norm) else find_nonfinite(step)
    odd = np.zeros(len(weights), dtype=bool) if nonfinite is None else nonfinite.tokens
    live = np.where(odd, 0.0, np.nan_to_num(weights, posinf=0.0, neginf=0.0))
    rest = norm
    if direction is None or not isfinite(norm):
        direction = step.gradient(live)
        rest = float(direction.products().sqrt())
        direction = direction if isfinite(rest) and rest > 0 else None
        if direction is not None:
            direction.rows.div_(rest)
    size = np.abs(live) * -np.expm1(np.minimum(step.table["logprob"].to_numpy(np.float64), 0.0))
    per_norm = -live / len(live) / rest if direction is not None else np.full_like(live, nan)
    shares = per_norm * step.along(direction) if direction is not None else per_norm
    named = np.union1d(np.flatnonzero(odd)[: 2 * NAMED], np.union1d(_largest(shares), _largest(size)))
    norms, products = step.terms(named, direction)
    if np.isnan(shares).all():
        shares[named] = per_norm[named] * products
    tokens = _describe(step, named, shares, np.abs(weights[named]) / len(weights) * norms)
    without, masks, in_line = [], [], False
    for what, mask in _sets(step, tokens, shares, odd):
        if in_line and what == "tokens":
            continue
        left = step.norm(np.where(mask, 0.0, live))
        without.append((what, int(mask.sum()), float(np.nansum(shares[mask])), left))
        masks.append(mask)
        in_line = in_line or left <= line
        if in_line and not (what == "tokens" and mask.sum() >= SEVERAL and step.table["response"][mask].nunique() == 1):
            break
    rows = pd.DataFrame(without, columns=["what", "tokens", "gradient_share", "norm"])
    spike = Spike(norm, line, nonfinite, shares, tokens, rows, masks, pd.DataFrame())
    chosen = spike.culprits if spike.found else np.isin(np.arange(len(live)), named)
    return Spike(*(getattr(spike, field.name) for field in fields(Spike)[:-1]), try_weightings(step, chosen))


def find_nonfinite(step: SpikedStep) -> NonFinite:
    """Find what is not finite first, of weights, log π, w_t and g_t, and at which tokens."""
    table, mask = step.table, step.jacobian.batch.response_mask
    for name, parameter in step.jacobian.model.named_parameters():
        if bad := int((~parameter.isfinite()).sum()):
            words = f"{bad} of {parameter.numel()} weights of {name} are not finite, already before this step"
            return NonFinite("weights", words, np.zeros(len(table), dtype=bool))
    for kind, name, words in (("log π", "logprob", "log π"), ("w", "weight", "w = −N · ∂loss/∂ log π")):
        odd = ~np.isfinite(table[name].to_numpy(np.float64))
        if odd.any():
            first = next(table[odd].itertuples())
            ratio = "" if np.isnan(first.old_logprob) else f", ratio {_ratio(table[odd])[0]:.3g}"
            where = f"position {first.position} of response {first.response} (advantage {first.advantage:.4g}{ratio})"
            words = f"{words} is {getattr(first, name)} at {odd.sum()} of {len(odd)} tokens, first at {where}"
            return NonFinite(kind, words, odd)
    weights, own = step.jacobian.spread(torch.from_numpy(step.weights[step.own])), torch.zeros_like(mask)
    for row in weights.any(1).nonzero()[:, 0].tolist():
        part = step.jacobian.select([row]).alone()
        own[row] = not part.vjp(part.kept(weights[[row]])[None] / len(table)).rows.isfinite().all()
    odd = np.array(step.processes.gather(own[mask].tolist()))
    if odd.any():
        rows = table["response"][odd].unique()
        words = f"the gradient of {len(rows)} responses is not finite, first of {rows[0]}, though log π and w are"
        return NonFinite("gradient", words, odd)
    return NonFinite("precision", "weights, log π, w and every gradient are finite in float32", odd)


def try_weightings(step: SpikedStep, culprits: Mask) -> pd.DataFrame:
    """Return the registry's weightings that would have removed these tokens, with the norm under each (see `Spike`).

    Those that split a step in two, controls, and those that need a column that the step lacks, are not tried.
    """
    table = step.table
    before = np.abs(step.weights[culprits]).sum()
    with np.errstate(invalid="ignore"):
        kl = np.nan_to_num(step.weights - table["policy_weight"].to_numpy(np.float64))
    tried: dict[str, Float[np.ndarray, " N"]] = {}
    for name, policy in _weightings(table):
        weights = policy + kl
        left = np.abs(weights[culprits]).sum()
        is_new = not any(np.allclose(weights, other) for other in tried.values())
        if np.isfinite(weights).all() and weights.any() and left <= LEFT * before and is_new:
            tried[name] = weights
    rows = [
        (name, float(np.abs(weights[culprits]).sum() / before), step.norm(weights))
        for name, weights in [*tried.items()][:TRIED]
    ]
    return pd.DataFrame(rows, columns=["weighting", "left", "norm"]).sort_values("norm", ignore_index=True)


def _weightings(table: pd.DataFrame) -> Iterator[tuple[str, Float[np.ndarray, " N"]]]:
    """Yield the weights of GRPO's clipped loss and of the registry's weightings of it that these columns determine."""
    new, old, advantage = (
        torch.tensor(table[name].to_numpy(np.float64))[None] for name in ("logprob", "old_logprob", "advantage")
    )
    with suppress(InputError):  # a log π or an advantage that is unknown
        given = new, torch.where(old.isnan(), new, old), advantage, torch.ones_like(new, dtype=torch.bool)
        clipped = token_weights(*given, **CLIPS, num_tokens=len(table))
        yield "clip", clipped[0].numpy() * table.get("loss_scale", 1.0)
    for name, kind in WEIGHTINGS.items():
        weighting = kind()
        other = weighting.is_whole or weighting.rule.lopti_eta is not None or weighting.rule.control is not None
        if not other:
            with suppress(InputError), np.errstate(all="ignore"):
                yield name, np.asarray(weighting.weights(table)["all"], dtype=np.float64)


def _largest(values: Float[np.ndarray, " N"]) -> np.ndarray:
    return np.argsort(-np.abs(np.nan_to_num(values)), kind="stable")[:NAMED]


def _describe(step: SpikedStep, named: np.ndarray, shares: np.ndarray, norms: np.ndarray) -> pd.DataFrame:
    rows = step.table.iloc[named].assign(token=named, gradient_share=shares[named], term_norm=norms)
    rows = rows.assign(
        text=[step.decode([token]) for token in rows["token_id"]],
        before=[step.decode(_ids_before(step.table, token)) for token in named],
        prob=np.exp(rows["logprob"]),
        ratio=_ratio(rows),
    )
    order = np.argsort(-np.where(np.isnan(shares[named]), np.inf, np.abs(shares[named])), kind="stable")
    return rows.iloc[order].reset_index(drop=True)


def _ids_before(table: pd.DataFrame, token: int) -> list[int]:
    rows = table.iloc[max(0, token - BEFORE) : token]
    return rows["token_id"][rows["response"] == table["response"].iloc[token]].tolist()


def _ratio(rows: pd.DataFrame) -> Float[np.ndarray, " n"]:
    with np.errstate(over="ignore"):
        return np.exp((rows["logprob"] - rows["old_logprob"]).to_numpy(np.float64))


def _sets(step: SpikedStep, tokens: pd.DataFrame, shares: np.ndarray, odd: Mask) -> Iterator[tuple[str, Mask]]:
    """Yield sets of tokens to leave out: the odd ones, the largest by share, then the largest response and prompt."""
    if odd.any():
        yield "odd", odd
    for count in (each for each in TOGETHER if each <= len(tokens)):
        yield "tokens", odd | np.isin(np.arange(len(shares)), tokens["token"][:count])
    for name in ("response", "group"):
        sums = pd.Series(np.nan_to_num(shares)).groupby(step.table[name].to_numpy()).sum()
        yield name, odd | (step.table[name] == sums.abs().idxmax()).to_numpy()
