"""Columns of the token table: a token's identity, probability, weight and gradient norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients.engine.results import TokenGradients
from gradscope.gradients.frozen import measuring
from gradscope.objective import LossSettings, TokenStatistics, batch_statistics, batch_weights, settle_advantages
from gradscope.policy import Policy, arithmetic_dtype
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes, digits

LOGITS, PARAMETERS, LAYER = "logit_grad_norm", "param_grad_norm", "act_grad_norm."
"""Columns with norms of token gradients: at the logits / T, over all parameters, and (prefix) at a layer."""
ADAMW = "param_grad_norm_adamw"
"""Column with ‖g ⊘ (√v̂ + ε)‖ over all parameters, with AdamW's v̂ after the batch's plain clipped step."""
ROUNDING = 1e-4
"""Largest rounding difference of log π in float32, in nats, between two ways of batching a sequence."""
TRIED = 4
"""Responses to rescore before accepting a table's log π as this policy's."""
FOREIGN = {2: 0.05, 4: 1e-3, 8: 1e-3}
"""Mean distance of log π, in nats, above which it is not this policy's, by the bytes of the arithmetic's dtype: two
devices differ by less."""


def identify_tokens(policy: Policy, one: TokenBatch, row: int) -> dict[str, object]:
    """Return position, id and text of one response's kept tokens. row: the response's row in the rollouts."""
    kept = one.response_mask[0]
    positions, ids = one.positions()[0][kept], one.input_ids[0][kept].tolist()
    return {
        "response": np.full(len(ids), row, dtype=np.int32),
        "group": np.full(len(ids), int(one.group_ids[0]), dtype=np.int64),
        "position": positions.numpy().astype(np.int32),
        "token_id": np.array(ids, dtype=np.int32),
        "token": [policy.decode([i]) for i in ids],
    }


def describe_tokens(one: TokenBatch, statistics: TokenStatistics) -> dict[str, Tensor]:
    """Return the probabilities of one response's kept tokens, and what is logged of them. statistics: of these [k]."""
    kept, logprob = one.response_mask[0], statistics.logprob.float().cpu()
    unknown = torch.full_like(logprob, float("nan"))
    old, ref = one.old_logprobs, one.ref_logprobs
    out = {
        "logprob": logprob,
        "prob": logprob.exp(),
        "log_one_minus_prob": statistics.log_one_minus_prob,
        "entropy": statistics.entropy,
        "old_logprob": unknown if old is None else old[0][kept],
        "ref_logprob": unknown if ref is None else ref[0][kept],
    }
    for name in ("sampler_logprob", "teacher_logprob"):
        if (logged := getattr(one, f"{name}s")) is not None:
            out[name] = logged[0][kept]
    of_response = {"loss_scale": one.loss_scales, "pair": one.pair_ids, "chosen": one.chosen, "z0": one.z0s}
    return out | {name: own[0].expand(len(logprob)) for name, own in of_response.items() if own is not None}


def weigh_tokens(batch: TokenBatch, columns: Mapping[str, Tensor], loss: LossSettings) -> dict[str, Tensor]:
    """Return advantage and weights (Eq. 2) of every kept token; NaN where the advantage is unknown.

    columns: `logprob` and `entropy` [n]. For a loss of its own, the advantage is the weight before the loss's scale.
    """
    kept, advantages = batch.response_mask, known_advantages(batch)
    known = torch.ones_like(kept) if loss.is_whole else ~advantages.isnan()
    batch = replace(batch, advantages=torch.where(known, advantages, 0.0))
    logprob, entropy = (
        torch.zeros(batch.input_ids.shape).masked_scatter_(kept, columns[name].float())
        for name in ("logprob", "entropy")
    )
    parts = batch_weights(logprob, batch, loss, num_tokens=batch.num_tokens, entropy=entropy)
    if loss.is_whole:
        advantages = settle_advantages(batch, logprob, loss, entropy=entropy)
    weights = {"policy_weight": parts.policy, "kl_weight": parts.kl, "weight": parts.total}
    out = {name: torch.where(known, w, float("nan"))[kept] for name, w in weights.items()}
    return {"advantage": advantages[kept]} | out | {"clipped": (parts.clipped & known)[kept]}


def refuse_infinite_weights(columns: Mapping[str, object] | pd.DataFrame) -> None:
    """Raise InputError if a token's weight is infinite, naming its `response` and `position`."""
    names = ("response", "position", "logprob", "old_logprob", "ref_logprob", "advantage", "kl_weight", "weight")
    values = {name: np.asarray(to_column(columns[name])) for name in names if name in columns}
    endless = np.isinf(values["weight"]).nonzero()[0]
    if not len(endless):
        return
    token = {name: value[endless[0]] for name, value in values.items()}
    told = f"the weight of the token at position {token['position']} of response {token['response']} is "
    told, logprob = f"{told}{token['weight']}: ", token["logprob"]
    if np.isinf(token.get("kl_weight", 0.0)):
        raise InputError(
            f"{told}its KL term, of log π {logprob:.4g} and log π_ref {token['ref_logprob']:.4g}, is beyond float32; "
            "do ref_logprobs come from this policy's reference? Give those, or a smaller --kl-coef"
        )
    clip, flag = (
        ("dual clip", "--clip-ratio-c") if token["advantage"] < 0 else ("clipping", "a smaller --clip-ratio-high")
    )
    raise InputError(
        f"{told}its ratio, the exponential of log π {logprob:.4g} − log π_old {token['old_logprob']:.4g}, has no bound "
        f"without {clip}; do old_logprobs come from this policy? Give rollouts of it, or {flag}"
    )


def known_advantages(batch: TokenBatch) -> Float[Tensor, "B S"]:
    """Return the batch's advantages, all NaN if it has none."""
    unknown = batch.advantages is None
    return torch.full(batch.input_ids.shape, float("nan")) if unknown else batch.advantages.float()


def gradient_columns(found: TokenGradients, modules: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Return the columns that need a backward pass: norms by layer, over all parameters, and by group of modules."""
    layers = {f"{LAYER}{layer}": norms for layer, norms in enumerate(found.act_grad_norm.T)}
    unused = torch.where(found.param_grad_norm.isnan(), found.param_grad_norm, 0.0)
    own = {
        f"{PARAMETERS}.{name}": torch.stack([found.module_grad_norm.get(one, unused) for one in group]).norm(dim=0)
        for name, group in modules.items()
    }
    scaled = {} if found.scaled_grad_norm is None else {ADAMW: found.scaled_grad_norm}
    return layers | {PARAMETERS: found.param_grad_norm} | scaled | own


def to_frame(columns: Mapping[str, object]) -> pd.DataFrame:
    """Make a DataFrame; floating tensors become float32, and tensors on a device are copied together."""
    there = {name: values for name, values in columns.items() if isinstance(values, Tensor) and not values.is_cpu}
    if there:
        here = torch.stack([values.detach().float() for values in there.values()]).cpu()
        columns = {**columns, **dict(zip(there, here, strict=True))}
    return pd.DataFrame({name: to_column(values) for name, values in columns.items()})


def to_column(values: object) -> object:
    """Convert a floating tensor to float32; return anything else unchanged."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.is_floating_point() else values).numpy()
    return values


def statistics_of(
    table: pd.DataFrame, policy: Policy, batch: TokenBatch, processes: Processes = ALONE
) -> TokenStatistics | None:
    """Return a token table's log π, log(1−π) and entropy at the batch's columns [B, S], 0 elsewhere.

    Returns None if rescoring some responses shows another rounding, and for a float64 policy, since the table keeps
    only float32. All processes call it together. Use them for weights and intervals, not for changes by a step, which
    need two scores computed alike.

    Raises InputError if rescoring shows that they are another policy's, or at another temperature.
    """
    names = [field.name for field in fields(TokenStatistics)]
    found = torch.zeros(len(names), *batch.input_ids.shape)
    found[:, batch.response_mask] = torch.tensor(table[names].to_numpy(np.float32)).T
    rows = batch.response_mask.any(1).nonzero()[:, 0]
    rows = rows[torch.linspace(0, len(rows) - 1, min(TRIED, len(rows))).long()]
    some = batch.select(rows)
    with measuring(policy.model, some.width):
        again = batch_statistics(policy.model, some, micro_batch_size=1, device=policy.device)
    scored = torch.stack([getattr(again, name) for name in names])
    apart = (scored[0] - found[0, rows])[some.response_mask].abs()
    if not apart.mean() <= FOREIGN[arithmetic_dtype(policy.model).itemsize]:
        raise InputError(
            f"the table's log π differs by {digits(float(apart.mean()))} nats on average from this policy's at the "
            "batch's temperature; give a table measured with this policy, in its dtype, on this batch"
        )
    same = scored.dtype == found.dtype and bool(apart.max() <= ROUNDING)
    return TokenStatistics(*found) if all(processes.gather([same])) else None


def refuse_other_loss(table: pd.DataFrame, batch: TokenBatch, loss: LossSettings) -> None:
    """Raise InputError for a table whose weights are not those of this loss with the table's own advantages."""
    if "weight" not in table:
        raise InputError("the table's norms are of another quantity than log π; give one measured without of")
    known = replace(batch, advantages=torch.full(batch.input_ids.shape, float("nan")))
    known.advantages[batch.response_mask] = torch.tensor(table["advantage"].to_numpy(np.float32))
    logprob = torch.tensor(table["logprob"].to_numpy(np.float32))
    entropy = torch.tensor(table["entropy"].to_numpy(np.float32))
    own = weigh_tokens(known, {"logprob": logprob, "entropy": entropy}, loss)["weight"].double().numpy()
    theirs = table["weight"].to_numpy(np.float64)
    if wrong := int((~np.isclose(theirs, own, rtol=1e-3, atol=1e-5, equal_nan=True)).sum()):
        raise InputError(
            f"the table's weights are not those of the given loss at {wrong:,} of {len(table):,} tokens; give the loss "
            "that the table was measured with, or measure it again with this one"
        )


def describe_reread(table: pd.DataFrame, batch: TokenBatch) -> str:
    """Say how an earlier table read the same log differently, in a verb phrase; "" if no difference is visible."""
    groups = batch.group_ids.repeat_interleave(batch.response_mask.sum(1)).numpy()
    if len(table) != len(groups):
        return f"took {len(table):,} tokens as sampled, not {len(groups):,}"
    before, after = table["group"].nunique(), len(np.unique(groups))
    if len({*zip(table["group"], groups, strict=True)}) != max(before, after) or before != after:
        return f"saw {before:,} groups of responses, not {after:,}"
    return ""
