"""The constants c and d of Eq. 3 at real activations: how much a block or the head can stretch or shrink a gradient.

In a context of n positions, a token's gradient propagates as δ_{ℓ-1} = J_ℓᵀ δ_ℓ, where J_ℓ [n·d, n·d] is the Jacobian
of block ℓ over the whole context, so σ_min(J_ℓ) ‖δ_ℓ‖ ≤ ‖δ_{ℓ-1}‖ ≤ σ_max(J_ℓ) ‖δ_ℓ‖. This is a theorem at that context
and at every token inside it, since a causal Jacobian maps gradients of earlier positions as on their own prefix. At the
head, with J [N, d] of logits / T at the last position, N > d makes σ_min(Jᵀ) zero; but only e_k − π ever enters, so

    c = min_k ‖Jᵀ(e_k − π)‖ / ‖e_k − π‖ over the vocabulary, exactly,      d = σ_max(J)        (arXiv:2505.12929, Eq. 3)

*certified*: from the SVD of the explicit Jacobian, up to the model's rounding. *estimated*: from
Lanczos on Jacobian products; a converged σ_max is almost surely the largest, but this is not proved.

A part of the report, at the shortest contexts of measured tokens (slow on large models):

    gradscope diagnose MODEL --rollouts FILE --part analyses/parts/constants.py:constants --out DIR
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.diagnosis import Block, Diagnosis, Measured, Paragraph, Rows, Sheets
from gradscope.errors import InputError, SelfCheckError, checked
from gradscope.gradients import LAYER, PARAMETERS, first_tensor, forward_hooks, measuring
from gradscope.objective import logit_gradient
from gradscope.policy import Policy, takes
from gradscope.rollouts import TokenBatch
from gradscope.runs import counted
from gradscope.theory import FLOOR, layer_gains, logit_grad_norm, require_columns

TITLE = "Constants of Eq. 3"
ASKS = ("table",)
FOLDED = True
LABELS = {
    "product_kind": "kind",
    "product_c": "∏c",
    "product_d": "∏d",
    "product_ratio": "∏d/∏c",
    "reach_ratio": "reach, max/min",
    "gain_min": "least gain",
    "gain_max": "largest gain",
    "gain_ratio": "gains, max/min",
}
CONTEXTS = 3
"""Contexts in the report."""
ROWS = 4096
"""Positions × vectors in one batched product."""
LANCZOS_RESTARTS = {"LA": 30, "SA": 10}
"""Restarts for the largest and smallest eigenvalue; the smallest converges at once or hardly ever."""
LANCZOS_TOLERANCE = 1e-6
LARGEST_RESIDUAL = 1e-2
"""Largest relative residual of a converged Lanczos value."""
LARGEST_FLOW = 1 << 28
"""Most entries of the Jacobian of one position's hidden state with respect to a layer; larger ones are not formed."""


def rows(m: Measured) -> Rows:
    """constants, constants_spreads and constants_bounds: the tables of `report_constants` at `CONTEXTS` contexts."""
    tokens, constants = add_constants(m.policy, m.batch, m.table, CONTEXTS)
    report = report_constants(tokens, constants, vocab_size=m.policy.vocab_size)
    return Rows(frames={"constants": constants, "constants_spreads": report.spreads, "constants_bounds": report.bounds})


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    constants, spreads, bounds = (found.frames[f"constants{part}"] for part in ("", "_spreads", "_bounds"))
    sheets.keep("constants", constants)
    sheets.keep("constants_bounds", bounds)
    caption = (
        "How far a gradient can be stretched or shrunk between a layer and the logits: products of singular values at "
        f"{counted(constants['context'].nunique(), 'context')}, the reach over the vocabulary there, and the gains of "
        "all measured tokens (medians over the contexts)."
    )
    shown = sheets.table("constants_spreads", spreads, caption)
    return [shown, Paragraph(head_words(constants)), Paragraph(bound_words(bounds))]


@dataclass(frozen=True)
class ConstantsReport:
    """What constants say about Eq. 3 on a token table; print it."""

    constants: pd.DataFrame
    """`layer_constants`."""
    spreads: pd.DataFrame
    """`compare_spreads`."""
    bounds: pd.DataFrame
    """`check_layer_bounds`."""
    rest_ratio: float
    """Ratio of largest to smallest 1−π among the tokens with 1−π above the floor."""

    def __str__(self) -> str:
        spreads = (
            "Spread of the products, ∏d/∏c at a context, beside the exact reach of gains over the vocabulary there\n"
            f"and the gains of real tokens, max/min each; 1−π itself spans {self.rest_ratio:.3g}× in the fits\n"
            f"{self.spreads.to_string(index=False, float_format=_digits)}\n"
            "certified constants belong to their own context; NaN: not converged; ∏c = 0: σ_min is below rounding"
        )
        parts = (head_words(self.constants), spreads, bound_words(self.bounds))
        return "\n".join(words.replace("\n", "\n   ") for words in parts)


def report_constants(
    tokens: pd.DataFrame, constants: pd.DataFrame, *, vocab_size: int, floor: float = FLOOR
) -> ConstantsReport:
    """Report what constants (`layer_constants`) say about Eq. 3 on a token table with a column `context`.

    context: the index of the context that the token follows; NaN if that has no constants.
    """
    rest = tokens["log_one_minus_prob"][tokens["log_one_minus_prob"] > np.log(floor)].astype(float)
    return ConstantsReport(
        constants,
        spreads=compare_spreads(layer_gains(tokens, floor=floor), constants),
        bounds=check_layer_bounds(tokens, constants, vocab_size),
        rest_ratio=float(np.exp(rest.max() - rest.min())),
    )


def add_constants(
    policy: Policy, batch: TokenBatch, table: pd.DataFrame, contexts: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the table with a column `context`, and Eq. 3's constants at the shortest contexts of different prompts.

    Uses only measured tokens with 1−π > 1e-3; raises InputError if there are none.
    """
    prompts = (batch.response_start - batch.attention_mask.int().argmax(1)).numpy()
    lengths = table["position"] + prompts[table["response"]]
    uncertain = table[PARAMETERS].notna() & (table["log_one_minus_prob"] > np.log(FLOOR))
    chosen = table.assign(length=lengths)[uncertain].sort_values("length", kind="stable")
    chosen = chosen.drop_duplicates("group").head(contexts)
    if chosen.empty:
        raise InputError(f"no measured token has 1−π > {FLOOR:g}, at whose context to compute constants; measure more")
    temperatures = batch.temperature[chosen["response"].tolist()].tolist()
    parts = []
    for index, (ids, temperature) in enumerate(zip(token_contexts(batch, chosen), temperatures, strict=True)):
        parts.append(layer_constants(policy, [ids], temperature=temperature).assign(context=index))
    numbers = pd.Series(np.arange(len(chosen), dtype=float), index=chosen.index)
    return table.assign(context=numbers.reindex(table.index)), pd.concat(parts, ignore_index=True)


def check_layer_bounds(
    tokens: pd.DataFrame,
    constants: pd.DataFrame,
    vocab_size: int,
    *,
    tiny: float = 1e-12,
    tolerance: float = 1e-4,
) -> pd.DataFrame:
    """Test Eq. 3 with the constants of the tokens' own contexts (`layer_constants`); a row per layer.

    tokens: rows of a token table with a column `context`, the index of the context that the token follows (NaN: none).
    The lower bound is vacuous if ∏c ≤ tiny or unknown, the upper if ∏d is unknown; violations (beyond the relative
    tolerance) are counted among the rest. Columns: layer, product_kind, tokens, lower_vacuous, lower_violated,
    lower_slack, upper_vacuous, upper_violated, upper_slack; a slack is the factor between the median token and the
    bound. Raises InputError if no token has both constants and a measured norm.
    """
    require_columns(tokens, ["context", "log_one_minus_prob"])
    rows = []
    for (layer, kind), part in constants.groupby(["layer", "product_kind"], sort=True):
        name = f"{LAYER}{layer}"
        require_columns(tokens, [name])
        known = tokens[[name, "log_one_minus_prob", "context"]].astype(float).dropna()
        known = known.merge(part[["context", "product_c", "product_d"]], on="context")
        rest, norm = np.exp(known["log_one_minus_prob"]), known[name]
        lower = known["product_c"] * np.sqrt(vocab_size / (vocab_size - 1)) * rest
        upper = known["product_d"] * np.sqrt(2) * rest
        row = {"layer": layer, "product_kind": kind, "tokens": len(known)}
        sides = (
            ("lower", known["product_c"] > tiny, norm >= lower * (1 - tolerance), norm / lower.where(lower > 0)),
            ("upper", np.isfinite(known["product_d"]), norm <= upper * (1 + tolerance), upper / norm.where(norm > 0)),
        )
        for side, meant, obeyed, slack in sides:
            row[f"{side}_vacuous"] = int((~meant).sum())
            row[f"{side}_violated"] = int((meant & ~obeyed).sum())
            row[f"{side}_slack"] = slack[meant].median()
        rows.append(row)
    if not sum(row["tokens"] for row in rows):
        raise InputError(
            "no token has both a measured norm and the constants of its context; measure the tokens whose contexts "
            "layer_constants got, and number them in the column context"
        )
    return pd.DataFrame([row for row in rows if row["tokens"]])


def compare_spreads(gains: pd.DataFrame, constants: pd.DataFrame) -> pd.DataFrame:
    """Compare the ratio ∏d/∏c at single contexts with the gains of real tokens; a row per layer.

    Columns: layer, product_kind, contexts, product_c, product_d, product_ratio and reach_ratio (medians over contexts
    of ∏d/∏c and of the ratio of largest to smallest gain over all tokens that could follow; ∞ if ∏c is 0, NaN if
    unknown everywhere), then gain_min, gain_max, gain_ratio of the tokens that did follow.
    """
    rows = []
    for (layer, kind), part in constants.groupby(["layer", "product_kind"], sort=True):
        measured = gains[gains["quantity"] == f"{LAYER}{layer}"]
        if measured.empty:
            raise InputError(f"the gains have no row of {LAYER}{layer}; give those of the constants' policy")
        c, d = part["product_c"].to_numpy(), part["product_d"].to_numpy()
        with np.errstate(divide="ignore"):
            ratio = pd.Series(d / c).dropna().median()
        row = {"layer": layer, "product_kind": kind, "contexts": part["context"].nunique()}
        row |= {name: part[name].dropna().median() for name in ("product_c", "product_d")}
        row |= {"product_ratio": ratio, "reach_ratio": (part["reach_max"] / part["reach_min"]).median()}
        rows.append(row | {f"gain_{name}": measured[name].iloc[0] for name in ("min", "max", "ratio")})
    return pd.DataFrame(rows)


def head_words(constants: pd.DataFrame) -> str:
    """Say that σ_min means nothing at the head, and what does."""
    head = constants[constants["module"] == "head"]
    vocab, width = (int(head[c].iloc[0]) for c in ("outputs", "inputs"))
    null = (
        f"σ_min(Jᵀ) is 0, for {vocab} logits > {width} dimensions leave a null space"
        if vocab > width
        else f"{vocab} logits ≤ {width} dimensions"
    )
    return (
        f"Head: {null};\n"
        f"the least of the other singular values is {_range(head['sigma_min'])}. What means something:\n"
        f"min over tokens k of ‖Jᵀ(e_k−π)‖/‖e_k−π‖ = {_range(head['c'])}, beside σ_max(J) = {_range(head['d'])}\n"
        f"({counted(len(head), 'context')}, exact, 1/T and soft caps included)."
    )


def bound_words(bounds: pd.DataFrame) -> str:
    """Say how many tokens break the bounds, and how far off these are: the products may swamp 1−π."""
    sides = []
    for side in ("lower", "upper"):
        meant = int((bounds["tokens"] - bounds[f"{side}_vacuous"]).sum())
        broken, vacuous = (int(bounds[f"{side}_{word}"].sum()) for word in ("violated", "vacuous"))
        slack = f"{_range(bounds[f'{side}_slack'])}× off by the layer" if meant else "nothing to compare"
        sides.append(f"{side} bound violated by {broken:,} of {meant:,} ({slack}), vacuous for {vacuous:,}")
    told = ";\n".join(sides)
    return f"Eq. 3 on tokens × layers, with the constants of each token's own context:\n{told}."


def _digits(value: float) -> str:
    return f"{value:.3g}"


def _range(values: pd.Series) -> str:
    low, high = _digits(values.min()), _digits(values.max())
    return low if low == high else f"{low} … {high}"


@dataclass(frozen=True)
class LocalJacobian:
    """The Jacobian of `output` with respect to the leaf `inputs`, both flattened, from the graph between them."""

    inputs: Tensor
    output: Tensor
    positions: int
    """Number of positions in the context, the cost of one product."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (outputs, inputs)."""
        return self.output.numel(), self.inputs.numel()

    def pull(self, seeds: Float[Tensor, "K outputs"]) -> Float[Tensor, "K inputs"]:
        """Return Jᵀ u for K vectors u at once."""
        return self._grad(self.output, self.inputs, seeds)

    def push(self, directions: Float[Tensor, "K inputs"]) -> Float[Tensor, "K outputs"]:
        """Return J v for K vectors v at once: the derivative with respect to u of Jᵀu, which is linear in u."""
        pulled, dual = self._dual
        return self._grad(pulled, dual, directions)

    def dense(self) -> Float[Tensor, "outputs inputs"]:
        """Return the explicit matrix, built by rows or columns, whichever are fewer."""
        rows, columns = self.shape
        product = self.pull if rows <= columns else self.push
        identity = torch.eye(min(rows, columns), dtype=self.output.dtype, device=self.output.device)
        return product(identity) if rows <= columns else product(identity).T

    @cached_property
    def _dual(self) -> tuple[Tensor, Tensor]:
        dual = torch.zeros_like(self.output, requires_grad=True)
        return torch.autograd.grad(self.output, self.inputs, dual, create_graph=True)[0], dual

    def _grad(self, output: Tensor, leaf: Tensor, seeds: Tensor) -> Tensor:
        seeds = seeds.reshape(len(seeds), *output.shape)
        parts = seeds.split(max(1, ROWS // self.positions))
        grads = [torch.autograd.grad(output, leaf, p, is_grads_batched=True, retain_graph=True)[0] for p in parts]
        return torch.cat(grads).flatten(1)


@dataclass(frozen=True)
class Constants:
    """Constants of one map at one context: c ‖u‖ ≤ ‖Jᵀu‖ ≤ d ‖u‖ for every possible gradient u from above."""

    kind: str
    """"certified" or "estimated"."""
    c: float
    """0 if below rounding, NaN if not converged; in both cases the lower bound is vacuous."""
    d: float
    """NaN if not converged."""
    sigma_min: float
    """Smallest of the min(outputs, inputs) singular values of J; for a block, c before checking for rounding."""
    residual: float = 0.0
    """‖JᵀJv − d²v‖ / d² of the estimate; 0 if certified."""
    residual_c: float = 0.0
    """The same for c."""


def block_constants(jacobian: LocalJacobian, *, max_exact: int = 1024) -> Constants:
    """Return σ_min and σ_max of a square Jacobian, by SVD up to `max_exact` inputs and by Lanczos beyond."""
    size = jacobian.shape[1]
    if size <= max_exact:
        sigma = torch.linalg.svdvals(jacobian.dense().double())
        kind, d, low, residual, residual_low = "certified", sigma[0].item(), sigma[-1].item(), 0.0, 0.0
    else:
        kind = "estimated"
        d, residual = _lanczos(jacobian, "LA")
        low, residual_low = _lanczos(jacobian, "SA")
    # transformers computes norms, softmax and rotations in float32, whatever the dtype.
    eps = max(torch.finfo(jacobian.output.dtype).eps, torch.finfo(torch.float32).eps)
    return Constants(kind, 0.0 if low <= eps * size**0.5 * d else low, d, low, residual, residual_low)


def head_constants(matrix: Float[Tensor, "N d"], logits: Float[Tensor, " N"]) -> Constants:
    """Return c over the vocabulary and d = σ_max, from the explicit Jacobian of logits / T."""
    deltas, norms = token_deltas(matrix, logits)
    sigma = torch.linalg.svdvals(matrix)
    return Constants("certified", (deltas.norm(dim=1) / norms).min().item(), sigma[0].item(), sigma[-1].item())


def token_deltas(
    matrix: Float[Tensor, "N d"], logits: Float[Tensor, " N"]
) -> tuple[Float[Tensor, "N d"], Float[Tensor, " N"]]:
    """Return Jᵀ(e_k − π) and ‖e_k − π‖ for each token k of the vocabulary; J [N, d] and logits are of logits / T."""
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    deltas = matrix - probs @ matrix
    norms = ((1 - probs).square() + (probs.square().sum() - probs.square())).sqrt()
    # Near π = 1 both cancel for the likeliest token, and only for it.
    top = logits.argmax()
    deltas[top] = logit_gradient(logits, top) @ matrix
    norms[top] = logit_grad_norm(logprobs, top)
    return deltas, norms


@checked
def layer_constants(
    policy: Policy, contexts: Sequence[Int[Tensor, "_"]], *, temperature: float, max_exact: int = 1024
) -> pd.DataFrame:
    """Compute the constants of Eq. 3 at some contexts (ids without padding, before the token in question).

    Returns a row per context and layer ℓ = 0 … L. `c` and `d` belong to the map directly above ℓ: block ℓ+1, or the
    head at L. `product_c` and `product_d` are the products from there to the logits, between which ‖δ_ℓ‖ / ‖e − π‖ lies
    for each token that can follow this context. `product_kind` is "certified" only if all factors are. A block is
    certified if n·d ≤ max_exact (its SVD takes (n·d)³ work), the head always. Float64 rounds least. `reach_min` and
    `reach_max` are the exact smallest and largest gain ‖δ_ℓ‖ / ‖e − π‖ over the vocabulary at this context; NaN if n·d²
    entries are too many (`LARGEST_FLOW`).

    Raises InputError without contexts, for empty or too long ones, and for a temperature that is not positive.
    """
    _check(policy, contexts, temperature)
    rows = []
    with measuring(policy.model, max(map(len, contexts), default=0)):
        for index, ids in enumerate(contexts):
            rows += _context_rows(policy, index, ids.to(policy.device), temperature, max_exact)
    return pd.DataFrame(rows)


def token_contexts(batch: TokenBatch, tokens: pd.DataFrame) -> list[Int[Tensor, "_"]]:
    """Return the ids before each of a table's tokens (`response`, `position`): `layer_constants`' contexts."""
    contexts = []
    for response, position in zip(tokens["response"], tokens["position"], strict=True):
        first = int(batch.attention_mask[response].int().argmax())
        ids, _ = batch.sequence(int(response))
        contexts.append(ids[: int(batch.response_start[response]) - first + int(position)])
    return contexts


@dataclass(frozen=True)
class _BlockCall:
    """The arguments and output of one block's call."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    def jacobian(self) -> LocalJacobian:
        """Run the block again with the same masks and rotations, as a function of the hidden states."""
        hidden = (self.args[0] if self.args else self.kwargs["hidden_states"]).detach().clone().requires_grad_(True)
        if self.args:
            output = first_tensor(self.block(hidden, *self.args[1:], **self.kwargs))
        else:
            output = first_tensor(self.block(**{**self.kwargs, "hidden_states": hidden}))
        if not (output - self.output).norm() <= 1e-3 * self.output.norm():
            raise SelfCheckError(f"{type(self.block).__name__} gives another output when run again on the same input")
        return LocalJacobian(hidden, output, hidden.shape[1])


def _context_rows(
    policy: Policy, index: int, ids: Tensor, temperature: float, max_exact: int
) -> list[dict[str, float | int | str]]:
    with torch.enable_grad():
        calls, head = _run(policy, ids, temperature)
        matrix, logits = head.dense().double(), head.output.detach().double()
        deltas, norms = token_deltas(matrix, logits)
        flow = _flow_of_last_position(head)
        rows, product_kind, product_c, product_d = [], "certified", 1.0, 1.0
        for layer in range(len(calls), -1, -1):
            if layer == len(calls):
                jacobian, constants = head, head_constants(matrix, logits)
            else:
                jacobian = calls[layer].jacobian()
                constants = block_constants(jacobian, max_exact=max_exact)
                flow = None if flow is None else jacobian.pull(flow)
            product_kind = product_kind if constants.kind == "certified" else "estimated"
            product_c, product_d = product_c * constants.c, product_d * constants.d
            module = "head" if layer == len(calls) else f"block {layer + 1}"
            shape = dict(zip(("outputs", "inputs"), jacobian.shape, strict=True))
            products = {"product_kind": product_kind, "product_c": product_c, "product_d": product_d}
            reach = dict(zip(("reach_min", "reach_max"), _reach(deltas, norms, flow), strict=True))
            where = {"context": index, "layer": layer, "module": module}
            rows.append(where | shape | vars(constants) | products | reach)
    return rows[::-1]


def _flow_of_last_position(head: LocalJacobian) -> Tensor | None:
    """Return the Jacobian [d, n·d] of the last position's final hidden state by that layer's."""
    width, length = head.shape[1], head.positions
    if width * width * length > LARGEST_FLOW:
        return None
    flow = torch.zeros(width, length, width, dtype=head.output.dtype, device=head.output.device)
    flow[:, -1] = torch.eye(width, dtype=flow.dtype, device=flow.device)
    return flow.flatten(1)


def _reach(deltas: Tensor, norms: Tensor, flow: Tensor | None) -> tuple[float, float]:
    """Return the smallest and largest ‖flowᵀ δ_L‖ / ‖e_k − π‖ over the tokens k, with each token's own δ_L."""
    if flow is None:
        return float("nan"), float("nan")
    gram = flow.double() @ flow.double().T
    gains = ((deltas @ gram) * deltas).sum(1).clamp(min=0).sqrt() / norms
    return gains.min().item(), gains.max().item()


def _run(policy: Policy, ids: Tensor, temperature: float) -> tuple[list[_BlockCall], LocalJacobian]:
    """Run a forward pass; return every block's call, and the head's graph from the last position to logits / T."""
    calls: list[_BlockCall] = []
    last = policy.blocks[-1]
    leaf: Tensor | None = None

    def record(_name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        nonlocal leaf
        hidden = first_tensor(output).detach()
        calls.append(_BlockCall(block, args, kwargs, hidden))
        if block is not last:
            return None
        leaf = hidden[:, -1:].clone().requires_grad_(True)
        cut = torch.cat([hidden[:, :-1], leaf], dim=1)
        return cut if isinstance(output, Tensor) else (cut, *output[1:])

    names = [f"{policy.blocks_name}.{i}" for i in range(len(policy.blocks))]
    few = {"logits_to_keep": 1} if takes(policy.model, "logits_to_keep") else {}
    with forward_hooks(policy.model, names, record):
        logits = policy.model(input_ids=ids[None], use_cache=False, **few).logits[0, -1]
    return calls, LocalJacobian(leaf, logits / temperature, len(ids))


def _lanczos(jacobian: LocalJacobian, which: str) -> tuple[float, float]:
    """Return the largest ("LA") or smallest ("SA") singular value and its residual; NaN if Lanczos did not converge."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    dtype, device, size = jacobian.output.dtype, jacobian.output.device, jacobian.shape[1]

    def square(vector: np.ndarray) -> np.ndarray:
        direction = torch.from_numpy(vector.reshape(1, -1)).to(device, dtype)
        return jacobian.pull(jacobian.push(direction))[0].double().cpu().numpy()

    operator = LinearOperator((size, size), matvec=square, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)  # any start will do; a fixed one is reproducible
    try:
        values, vectors = eigsh(
            operator, k=1, which=which, v0=start, tol=LANCZOS_TOLERANCE, maxiter=LANCZOS_RESTARTS[which]
        )
    except ArpackNoConvergence:
        return float("nan"), float("nan")
    value, vector = float(values[0]), vectors[:, 0]
    if value <= 0:
        return float("nan"), float("nan")
    residual = float(np.linalg.norm(square(vector) - value * vector)) / value
    return (value**0.5 if residual <= LARGEST_RESIDUAL else float("nan")), residual


def _check(policy: Policy, contexts: Sequence[Tensor], temperature: float) -> None:
    if not contexts or any(len(ids) == 0 for ids in contexts):
        raise InputError(
            "there is no context, or an empty one; give the ids of at least one token before the one in question"
        )
    if policy.context is not None and (longest := max(map(len, contexts))) > policy.context:
        raise InputError(f"a context has {longest} tokens and the model takes {policy.context}; give shorter ones")
    if not temperature > 0:
        raise InputError(f"temperature is {temperature}; probabilities need T > 0; pass the sampling temperature")
