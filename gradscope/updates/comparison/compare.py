"""Every weighting on one batch: whom each would serve, how far it turns the update, how much of it is signal.

All weightings are judged on the same tokens and against the plain loss, by the policy part of their gradient. Bounds
redraw or leave out whole prompts, those with equal rewards among them. What depends on the batch as a whole, quantiles
of entropy, covariances and random draws, stays as it is meanwhile, and so does the update whose directions are judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from gradscope.errors import InputError, checked
from gradscope.gradients import ADAMW, BACKWARD, FORWARD_MODE, describe_reread, measure, note_logged
from gradscope.intervals import EDGES, interval_labels
from gradscope.objective import (
    COMPARED,
    PAPER,
    WEIGHTINGS,
    LossSettings,
    Weighting,
    check_weighting,
    describe_off_policyness,
    make_weighting,
    resolve_advantages,
    spell_out,
)
from gradscope.policy import AdamWState, Policy, PolicyLike, gradient_budget, read_state
from gradscope.rollouts import BatchLike, Note, TokenBatch, read_inputs
from gradscope.runs import ALONE, Processes, Progress, settle_progress
from gradscope.updates.comparison.judge import Judge, columns
from gradscope.updates.comparison.passes import Passes, pass_through
from gradscope.updates.comparison.real_steps import gains_on_unseen_prompts, take_steps
from gradscope.updates.movement import update_cost
from gradscope.updates.step import StepSettings, state_step

PLAIN = "grpo"
SAME = 1e-4
"""Weights are the same where none differs by more than this part of the largest: log π of sampler and trainer round."""


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
    """What each weighting would do with one batch."""

    table: pd.DataFrame
    """A row per weighting and optimizer step: `method`; `step`, "all", or "low" and "high" of two, and "both" for what
    two real ones do; `same_as`: the earlier row whose weights these are, up to rounding, and whose numbers they share,
    or "". Each number has columns NAME_lower and NAME_upper, and where NAME_difference stands, that is to plain GRPO.

    norm_ratio: ‖U‖ over plain's, U the summed gradient; cosine: of U and plain's. signal_to_noise of one prompt (see
    `IntervalGradients`), and its difference. right_sgd, right_adamw: the share of the tokens with an advantage whose
    log π goes its way to first order, of those that move; right_step: the same after real steps of AdamW, momentum and
    decay among them, and step_cosine that of both displacements. effective_share: (Σ|w|‖g‖)²/Σw²‖g‖² over the number of
    tokens, what part of them carries the update; effective_share_adamw in the optimizer's metric, where the table has
    norms in it. zero_share: tokens without weight. gain: in expected reward, to first order, on prompts that a
    weighting's own AdamW step has not seen (`gains_on_unseen_prompts`), with gain_difference."""
    by_interval: pd.DataFrame
    """A row per weighting, step and interval of π: energy_share, of Σ w²‖g‖², with energy_share_difference, and
    energy_share_adamw where the table has norms in that metric; gradient_share, ⟨U_a, U⟩/‖U‖², which adds up to 1 and
    has no bounds (those would need U_a itself)."""
    weights: pd.DataFrame
    """w_t of each token under each weighting: response, position, then a column METHOD or METHOD.STEP, each called as
    the user called it."""
    labels: tuple[str, ...]
    num_prompts: int
    num_informative_prompts: int
    """Those with an advantage other than 0."""
    notes: tuple[Note, ...]
    passes: Passes
    """What they rest on: inner products, changes along the sums, how these were made, and how long it took."""
    aggregation: str = "token-mean"

    def statistics(self) -> pd.DataFrame:
        """The table in long form, a row per weighting, step and number that it has: method, step, same_as, statistic
        (the number's column), value, lower, upper (NaN where it has no bounds)."""
        table, keys = self.table.reset_index(drop=True), ["method", "step", "same_as"]
        parts = []
        for name in table.columns.difference(keys, sort=False):
            if not name.endswith(("_lower", "_upper")):
                bounds = {end: table.get(f"{name}_{end}", np.nan) for end in ("lower", "upper")}
                parts.append(table[keys].assign(statistic=name, value=table[name], **bounds))
        long = pd.concat(parts).sort_index(kind="stable")  # a weighting's numbers together
        return long.dropna(subset="value").reset_index(drop=True)

    def __repr__(self) -> str:
        return f"Comparison of {self.table['method'].nunique()} weightings\n{self._numbers().to_string(na_rep='–')}"

    def _repr_html_(self) -> str:
        return f"<p><b>Comparison</b> on {self.num_prompts} prompts</p>{self._numbers().to_html(na_rep='–')}"

    def _numbers(self) -> pd.DataFrame:
        names = ["norm_ratio", "cosine", "signal_to_noise", "right_sgd", "right_adamw", "effective_share"]
        shown = self.table.set_index(["method", "step"])
        return shown[["same_as", *(name for name in names if name in shown)]].round(3)


@dataclass(frozen=True)
class _Row:
    """One summed gradient: a weighting's in one of its optimizer steps."""

    method: str
    step: str
    weights: Float[np.ndarray, " K"]
    same_as: str = ""


@checked
def compare(
    policy: PolicyLike,
    batch: BatchLike,
    methods: str | Sequence[str | Weighting] | None = None,
    *,
    table: pd.DataFrame | None = None,
    loss: LossSettings = PAPER,
    aggregation: Literal["token-mean", "sequence"] = "token-mean",
    edges: Sequence[int | float] = EDGES,
    optimizer_state: AdamWState | dict[str, Any] | str | Path | None = None,
    step: StepSettings | None = None,
    memory: int | None = None,
    micro_batch_size: int = 4,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
    processes: Processes = ALONE,
    progress: bool | Progress = False,
) -> Comparison:
    """Compare token weightings on one batch, each with plain GRPO; the policy is as it was afterwards.

    methods: as `make_weighting` takes them, a parameter's values with a slash between them (`icepop:high=2/5`), or
    Weightings; None: all of COMPARED that the batch has columns for, a note names the others. table: of
    `measure(policy, batch, …)` with these settings and edges, maybe of a sample; None: measured here. loss: the plain
    one, without its KL part, which no weighting changes. optimizer_state: what AdamW's `state_dict()` saved, from which
    the real steps of two-step methods go on; or an `AdamWState`, which gives the metric alone; None: no numbers under
    AdamW. step: of the real ones; None: as the state says. memory: bytes
    for vectors as long as the parameters, which decides how many weightings go together (`passes`); None: a sixth of
    what is free. processes: share the prompts; the result is everybody's.

    Costs for each distinct row of weights a backward pass over the batch and a derivative in forward mode along its
    sum; with an optimizer state another derivative, and real steps on each half of the prompts with one more. Raises
    InputError for a method that is not known or lacks a column, for a batch without advantages and rewards, and for
    settings, a table or a state that do not fit.
    """
    policy, batch = read_inputs(policy, batch)
    optimizer_state = read_state(optimizer_state) if isinstance(optimizer_state, str | Path) else optimizer_state
    if loss.reweight_alpha is not None:
        raise InputError(f"reweight_alpha is {loss.reweight_alpha}; plain GRPO has none, name reweight in methods")
    labels, progress = interval_labels(edges), settle_progress(progress)
    _check_advantages(batch)
    saved = optimizer_state if isinstance(optimizer_state, dict) else None
    metric = optimizer_state
    if saved is not None:
        step = state_step(saved) if step is None else step
        metric = AdamWState.from_state_dict(policy.model, saved, max_grad_norm=step.max_grad_norm)
    if table is None:
        sample = {"tokens_per_interval": "enough", "seed": seed, "loss": loss}
        sample |= {"metric": None if metric is None else "adamw", "optimizer_state": metric}
        table = measure(policy, batch, edges=edges, progress=progress, **sample)
    if told := describe_reread(table, batch):
        raise InputError(f"the table's maker {told}; give a table that was measured of this batch")
    batch = _with_advantages(batch, table)
    notes = [*note_logged(policy, batch, table), *batch.without_notes("on-policy").notes]
    notes.append(Note(describe_off_policyness(table, loss), "off-policy"))
    if "sampler_logprob" in table and 0 < (unknown := int(table["sampler_logprob"].isna().sum())) < len(table):
        words = (
            f"{unknown:,} of {len(table):,} tokens have no log-probability of the sampler: what is made of it has k = 1"
        )
        notes.append(Note(f"{words} there, as TRL has it.", "sampler-unknown"))
    weightings = _settle([methods] if isinstance(methods, str) else methods, table, notes)
    rows = _make_rows(weightings, table, aggregation)
    if split := _split(rows):
        words = "takes two optimizer steps" if len(split) == 1 else "take two optimizer steps"
        notes.append(Note(f"{', '.join(split)} {words}, equal to GRPO's one to first order under SGD.", "two-steps"))
    if any(weighting.passes.control == "matched-norm" for weighting in weightings):
        notes.append(Note("matched-norm is GRPO's update, as long as Reweight's.", "matched-norm"))
    distinct = [row for row in rows if not row.same_as]
    weights = np.stack([row.weights for row in distinct])
    memory = gradient_budget(policy.device, processes) if memory is None else memory
    passes = pass_through(
        policy,
        batch,
        torch.from_numpy(weights),
        metric=metric,
        memory=memory,
        micro_batch_size=micro_batch_size,
        processes=processes,
        progress=progress,
    )
    judge = Judge(table, labels, seed, confidence, resamples)
    carried, energy = judge.energies(weights)
    if ADAMW in table and table[ADAMW].notna().any():
        carried, energy = (
            a | b for a, b in zip((carried, energy), judge.energies(weights, ADAMW, "_adamw"), strict=True)
        )
    zero = {"zero_share": (weights == 0).mean(1)}
    known = pd.DataFrame(_keys(distinct) | columns(judge.gradients(passes) | carried) | zero)
    shares = {"gradient_share": judge.gradient_shares(weights, passes).ravel()}
    by_interval = pd.DataFrame(_interval_keys(distinct, table, labels) | columns(energy) | shares)
    steps, gains = pd.DataFrame(), pd.DataFrame()
    if saved is not None:
        keywords = {"loss": loss, "step": step, "optimizer_state": saved, "memory": memory, "progress": progress}
        steps = _take_steps(policy, batch, rows, judge, keywords)
        if aggregation == "token-mean":  # as the trainer steps
            keywords |= {"micro_batch_size": micro_batch_size, "seed": seed}
            gains = _gains(policy, batch, weightings, rows, judge, keywords)
    return Comparison(
        _join_gains(_join(rows, known, steps), gains),
        _spread(rows, by_interval),
        _weights(rows, table),
        tuple(labels),
        table["group"].nunique(),
        table.loc[table["advantage"] != 0, "group"].nunique(),
        tuple(dict.fromkeys(notes)),
        passes,
        aggregation,
    )


def compare_cost(*, metric: bool) -> float:
    """Forward passes over the batch that take as long as `compare` at most does where no weighting is named."""
    rows = len(COMPARED) + 2  # two of them take two steps
    gains = rows * (update_cost() + FORWARD_MODE) + 3 * update_cost(2)
    return 1 + rows * (BACKWARD + FORWARD_MODE * (1 + metric)) + (gains if metric else 0)


def _check_advantages(batch: TokenBatch) -> None:
    unknown = int(resolve_advantages(batch)[batch.response_mask].isnan().sum())
    if unknown:
        raise InputError(f"{unknown} tokens have no advantage, so no weight; give rewards or advantages of all")


def _with_advantages(batch: TokenBatch, table: pd.DataFrame) -> TokenBatch:
    """The batch with the table's advantages: weights and directions are of the same."""
    advantages = torch.zeros(batch.input_ids.shape)
    advantages[batch.response_mask] = torch.tensor(table["advantage"].to_numpy(np.float32))
    return replace(batch, advantages=advantages)


def _settle(methods: Sequence[str | Weighting] | None, table: pd.DataFrame, notes: list[Note]) -> list[Weighting]:
    """The weightings, plain GRPO first; of all known ones, those that the table has columns for."""
    plain = WEIGHTINGS[PLAIN]()
    if methods is not None:
        given = [
            weighting
            for method in methods
            for weighting in (map(make_weighting, spell_out(method)) if isinstance(method, str) else [method])
        ]
        chosen = [plain, *(weighting for weighting in given if str(weighting) != PLAIN)]
        names = [*map(str, chosen)]  # one weighting by two names is two
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"{twice[0]} is given twice; give each weighting once")
        return chosen
    chosen = [plain]
    for weighting in (WEIGHTINGS[name]() for name in COMPARED):
        try:
            weighting.weights(table)
        except InputError as error:
            notes.append(Note(f"{weighting} is left out: {error.reason}.", "left-out"))
        else:
            chosen += [] if weighting == plain else [weighting]
    return chosen


def _make_rows(weightings: Sequence[Weighting], table: pd.DataFrame, aggregation: str) -> list[_Row]:
    rows: list[_Row] = []
    for weighting in weightings:
        for step, weights in weighting.weights(table, aggregation=aggregation).items():
            if not np.isfinite(weights).all():
                raise InputError(f"{weighting} has weights that are not finite; leave it out, or give a sound log")
            earlier = (row for row in rows if not row.same_as and _same(row.weights, weights))
            same = next(earlier, None)
            rows.append(_Row(str(weighting), step, weights, "" if same is None else _name(same)))
    return rows


def _name(row: _Row) -> str:
    return row.method if row.step == "all" else f"{row.method}.{row.step}"


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= SAME * max(np.abs(one).max(), np.abs(other).max()))


def _keys(rows: Sequence[_Row]) -> dict[str, list[str]]:
    return {"method": [row.method for row in rows], "step": [row.step for row in rows]}


def _interval_keys(rows: Sequence[_Row], table: pd.DataFrame, labels: Sequence[str]) -> dict[str, np.ndarray]:
    size = len(labels)
    counts = np.bincount(table["interval"], minlength=size)
    own = {"interval": np.arange(size), "label": np.array(labels), "num_tokens": counts}
    keys = {name: np.repeat(values, size) for name, values in _keys(rows).items()}
    return keys | {name: np.tile(values, len(rows)) for name, values in own.items()}


def _split(rows: Sequence[_Row]) -> dict[str, list[_Row]]:
    """The weightings of several optimizer steps whose weights add up to plain's."""
    own = {
        method: [row for row in rows if row.method == method] for method in dict.fromkeys(row.method for row in rows)
    }
    plain = rows[0].weights
    return {m: parts for m, parts in own.items() if len(parts) > 1 and _same(sum(p.weights for p in parts), plain)}


def _take_steps(
    policy: Policy, batch: TokenBatch, rows: Sequence[_Row], judge: Judge, keywords: dict[str, Any]
) -> pd.DataFrame:
    """Real steps of plain GRPO, then of each weighting that splits plain's tokens among several; empty without one."""
    masks = {method: [(row.step, row.weights != 0) for row in own] for method, own in _split(rows).items()}
    if not masks:
        return pd.DataFrame()
    changes, cosines = take_steps(policy, batch, masks, **keywords)
    both = {"method": [PLAIN, *masks], "step": "both", "step_cosine": cosines}
    return pd.DataFrame(both | columns(judge.directions("right_step", changes)))


def _join(rows: Sequence[_Row], known: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """A row for every weighting and step, with the numbers of the row whose weights it has; and those of real steps."""
    numbers = {_name(row): dict(found) for row, found in _pairs(rows, known)}
    out = []
    for row in rows:
        keys = {"method": row.method, "step": row.step, "same_as": row.same_as}
        out.append(keys | {k: v for k, v in numbers[row.same_as or _name(row)].items() if k not in keys})
    found = pd.DataFrame(out)
    if steps.empty:
        return found
    plain = steps.iloc[0].drop(["method", "step"])
    found[plain.index] = np.nan
    found.loc[found["method"] == PLAIN, plain.index] = plain.to_numpy(np.float64)
    added = steps.iloc[1:].assign(same_as="")
    joined = pd.concat([found, added], ignore_index=True)
    order = joined["method"].map({name: place for place, name in enumerate(found["method"].unique())})
    return joined.iloc[np.argsort(order, kind="stable")].reset_index(drop=True)


def _gains(
    policy: Policy,
    batch: TokenBatch,
    weightings: Sequence[Weighting],
    rows: Sequence[_Row],
    judge: Judge,
    keywords: dict[str, Any],
) -> pd.DataFrame:
    """A row per weighting of weights of its own whose steps the trainer takes; empty where no gain can be known."""
    once, split = {row.method for row in rows if row.step == "all" and not row.same_as}, _split(rows)
    own = [
        w
        for w in weightings
        if (str(w) in once and _is_trained(w, batch)) or (str(w) in split and w.passes.lopti_eta is not None)
    ]
    found = gains_on_unseen_prompts(policy, batch, own, **keywords)
    return pd.DataFrame() if found is None else pd.DataFrame(columns(judge.gains(found)), index=[*map(str, own)])


def _is_trained(weighting: Weighting, batch: TokenBatch) -> bool:
    """Whether a step can be taken under it: some are made of columns that only the table has."""
    try:
        check_weighting(weighting, sampler_logprobs=batch.sampler_logprobs is not None)
    except InputError:
        return False
    return True


def _join_gains(table: pd.DataFrame, gains: pd.DataFrame) -> pd.DataFrame:
    """The table with the gains, each in the row of all of a weighting's steps."""
    if gains.empty:
        return table
    whole = table["step"].isin(["all", "both"])
    names = table["method"].where(table["same_as"] == "", table["same_as"]).where(whole, "")
    return table.join(gains.reindex(names).set_axis(table.index))


def _spread(rows: Sequence[_Row], known: pd.DataFrame) -> pd.DataFrame:
    """The intervals' numbers of every weighting and step."""
    groups = {(method, step): part for (method, step), part in known.groupby(["method", "step"], sort=False)}
    distinct = {_name(row): (row.method, row.step) for row in rows if not row.same_as}
    parts = [
        groups[distinct[row.same_as or _name(row)]].assign(method=row.method, step=row.step, same_as=row.same_as)
        for row in rows
    ]
    return pd.concat(parts, ignore_index=True)


def _pairs(rows: Sequence[_Row], known: pd.DataFrame) -> Iterator[tuple[_Row, pd.Series]]:
    distinct = [row for row in rows if not row.same_as]
    yield from zip(distinct, (found for _, found in known.iterrows()), strict=True)


def _weights(rows: Sequence[_Row], table: pd.DataFrame) -> pd.DataFrame:
    columns = {_name(row): row.weights.astype(np.float32) for row in rows}
    return pd.concat([table[["response", "position"]], pd.DataFrame(columns, index=table.index)], axis=1)
