"""The constants c and d of Eq. 3 at real activations: how much a block or the head can stretch or shrink a gradient.

In a context of n positions, a token's gradient propagates as δ_{ℓ-1} = J_ℓᵀ δ_ℓ, where J_ℓ [n·d, n·d] is the Jacobian
of block ℓ over the whole context, so σ_min(J_ℓ) ‖δ_ℓ‖ ≤ ‖δ_{ℓ-1}‖ ≤ σ_max(J_ℓ) ‖δ_ℓ‖. This is a theorem at that context
and at every token inside it, since a causal Jacobian maps gradients of earlier positions as on their own prefix. At the
head, with J [N, d] of logits / T at the last position, N > d makes σ_min(Jᵀ) zero; but only e_k − π ever enters, so

    c = min_k ‖Jᵀ(e_k − π)‖ / ‖e_k − π‖ over the vocabulary, exactly,      d = σ_max(J)        (arXiv:2505.12929, Eq. 3)

*certified*: from the SVD of the explicit Jacobian, up to the model's rounding. *estimated*: from
Lanczos on Jacobian products; a converged σ_max is almost surely the largest, but this is not proved.
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

from gradscope.errors import InputError, SelfCheckError, checked
from gradscope.gradients import first_tensor, forward_hooks, measuring
from gradscope.objective import logit_gradient
from gradscope.policy import Policy, takes
from gradscope.rollouts import TokenBatch
from gradscope.theory.closed_form import logit_grad_norm

ROWS = 4096
"""Positions × vectors in one batched product."""
LANCZOS_RESTARTS = {"LA": 30, "SA": 10}
"""Restarts for the largest and smallest eigenvalue; the smallest converges at once or hardly ever."""
LANCZOS_TOLERANCE = 1e-6
LARGEST_RESIDUAL = 1e-2
"""Largest relative residual of a converged Lanczos value."""
LARGEST_FLOW = 1 << 28
"""Most entries of the Jacobian of one position's hidden state with respect to a layer; larger ones are not formed."""


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
