"""The loss that RL trains and the weight it gives each token's ∇ log π: advantages, Reweight, Lopti, clipping, KL.

Equation numbers refer to arXiv:2505.12929. Tensors are [B, T], any slice of the aligned batch; `advantages` may be [B],
one per response. Masked entries are ignored and may hold anything; a NaN at a kept token raises InputError.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.rollouts import group_moments

Number = int | float
Advantages = Float[Tensor, " B"] | Float[Tensor, "B T"]
Rewards = Float[Tensor, " B"] | Int[Tensor, " B"]
Estimator = Literal["k1", "k2", "k3"]
"""Of KL(π ‖ π_ref) at sampled tokens."""


@checked
def grpo_advantages(rewards: Rewards, group_ids: Int[Tensor, " B"], *, eps: Number = 1e-6) -> Float[Tensor, " B"]:
    """Compute GRPO's advantages: (R − group mean) / (sample standard deviation (n − 1) of the group + eps).

    Groups of one response, and groups whose rewards are all equal, get exactly 0.

    >>> grpo_advantages(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 3]))
    tensor([ 0.7071, -0.7071,  0.0000])
    """
    _refuse_nonfinite(rewards, "rewards")
    return scale_rewards(rewards, *group_moments(rewards, group_ids), eps=eps)


def scale_rewards(
    rewards: Rewards, means: Float[Tensor, " B"], stds: Float[Tensor, " B"], *, eps: Number
) -> Float[Tensor, " B"]:
    """Compute (R − mean) / (standard deviation + eps) for known moments of each response's group; 0 where that is 0."""
    advantages = torch.where(stds == 0, 0.0, (rewards.double() - means) / (stds + eps))
    return advantages.to(_float_dtype(rewards))


@checked
def reinforce_pp_advantages(
    rewards: Rewards,
    old_logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    kl_coef: Number,
) -> Float[Tensor, "B T"]:
    """Compute REINFORCE++ advantages (Eq. 20, 21): A_t = R − kl_coef · Σ_{j≥t} log(π_old/π_ref)_j, whitened.

    The sum runs over kept tokens only; masked tokens get 0. Pass the whole batch with full responses, since whitening
    and credit need all tokens. With `kl_coef` 0, `ref_logprobs` is not used.
    """
    _refuse_nonfinite(rewards, "rewards")
    returns = rewards.double().unsqueeze(-1).expand(response_mask.shape)
    if kl_coef != 0:
        penalties = kl_k1(old_logprobs.double(), ref_logprobs.double())
        penalties = torch.where(response_mask, penalties, 0.0)
        _refuse_nonfinite(penalties, "old_logprobs − ref_logprobs")
        returns = returns - kl_coef * penalties.flip(-1).cumsum(-1).flip(-1)
    return whiten(returns, response_mask).to(_float_dtype(rewards))


def whiten(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return (A − mean) / √(var + 1e-8) over the kept tokens, with unbiased variance (n − 1); 0 on masked ones.

    A single kept token, and equal values, give exactly 0.

    >>> whiten(torch.tensor([[1.0, 9.0, 3.0]]), torch.tensor([[True, False, True]]))
    tensor([[-0.7071,  0.0000,  0.7071]])
    """
    kept = values[mask]
    if not kept.numel() or kept.min() == kept.max():
        return torch.zeros_like(values)
    centred = torch.where(mask, values - kept.mean(), 0.0)
    variance = centred.square().sum() / (kept.numel() - 1)
    return centred / (variance + 1e-8).sqrt()


@checked
def reweight(advantages: Advantages, old_logprobs: Float[Tensor, "B T"], *, alpha: Number) -> Float[Tensor, "B T"]:
    """Apply Advantage Reweighting (Eq. 4): Â ← [α·π_old + (1 − α)]·Â. A token of probability 0 keeps 1 − α of it.

    >>> reweight(torch.tensor([2.0]), torch.tensor([[1.0, 0.5]]).log(), alpha=0.3)
    tensor([[2.0000, 1.7000]])
    """
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha is {alpha}; Reweight takes a number from 0 (off) to 1; the paper uses 0.1 to 0.3")
    return (alpha * old_logprobs.exp() + (1 - alpha)) * _per_token(advantages)


@checked
def lopti_split(
    old_logprobs: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], *, eta: Number
) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return Lopti's two masks (Alg. 1): kept tokens with π_old < eta, and the other kept tokens.

    Use each as the `response_mask` of a step, with `num_tokens` still the count of all response tokens.
    """
    if not 0 <= eta <= 1:
        raise InputError(f"eta is {eta}; Lopti splits at a probability from 0 to 1; the paper uses 0.5")
    check_known(response_mask, old_logprobs=old_logprobs)
    # Compare logarithms: exp may round differently on another device, and put a token into both masks or neither.
    low = response_mask & (old_logprobs < (math.log(eta) if eta > 0 else -math.inf))
    return low, response_mask & ~low


def kl_k1(logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the k1 estimate of KL(π ‖ π_ref) at sampled tokens, log(π/π_ref): unbiased, of either sign."""
    return logprobs - ref_logprobs


def kl_k3(logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the k3 estimate of KL(π ‖ π_ref) at sampled tokens (Eq. 1), π_ref/π − log(π_ref/π) − 1 ≥ 0, not clamped.

    >>> round(kl_k3(torch.tensor(0.0), torch.tensor(0.5).log()).item(), 6)  # ½ − log ½ − 1
    0.193147
    """
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def kl_k2(logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the k2 estimate of KL(π ‖ π_ref) at sampled tokens, ½·log²(π/π_ref): biased, with KL's mean gradient."""
    return (logprobs - ref_logprobs).square() / 2


KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""Estimator → its value at sampled tokens."""


def kl_slope(
    logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"], estimator: Estimator
) -> Float[Tensor, "*shape"]:
    """Return ∂/∂ log π of an estimate: 1 for k1, log(π/π_ref) for k2, 1 − π_ref/π for k3.

    k1's says nothing of the reference: its mean over what the policy samples is 0, and so are its gradient's.
    """
    if estimator == "k1":
        return torch.ones_like(logprobs)
    return logprobs - ref_logprobs if estimator == "k2" else -torch.expm1(ref_logprobs - logprobs)


@checked
def policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Advantages,
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_ratio_low: Number,
    clip_ratio_high: Number,
    clip_ratio_c: Number | None = None,
    ref_logprobs: Float[Tensor, "B T"] | None = None,
    kl_coef: Number = 0.0,
    kl_corrected: bool = False,
    kl_estimator: Estimator = "k3",
    num_tokens: Number,
    has_reference: Bool[Tensor, "B T"] | None = None,
    loss_scales: Float[Tensor, " B"] | None = None,
    refuse_nan: bool = True,
) -> Float[Tensor, ""]:
    """Compute the negative of Eq. 1, a scalar to minimise: −Σ_kept [min(r·Â, clip(r)·Â) − kl_coef·KL] / num_tokens.

    With `clip_ratio_c` the surrogate of a negative Â is at least c·Â (dual clip). `num_tokens` is the count of response
    tokens in the whole mini-batch, so that the losses of micro-batches, or of Lopti's two masks, add up to the
    mini-batch's. Exactly at a clip boundary a token is not clipped (I_trust's inequalities are strict). With `kl_coef`
    0, `ref_logprobs` is not used. Gradients flow only into `logprobs`. KL is estimated by `kl_estimator`, k3 in the
    paper and in TRL. `kl_corrected` multiplies it by the unclipped ratio r, so that the gradients of k1 and k3 are that
    of KL(π ‖ π_ref); on in TRL, off in the paper. Tokens outside `has_reference` (None: none) have no KL, and their
    `ref_logprobs` are not used. `loss_scales` multiply each response's terms, for losses that are not
    the mean over tokens.
    A NaN on a kept token raises InputError; refuse_nan=False skips this check, which synchronises with a GPU.
    """
    _check_settings(clip_ratio_low, clip_ratio_high, clip_ratio_c, kl_coef, ref_logprobs, num_tokens)
    check_estimator(kl_estimator)
    known = {"old_logprobs": old_logprobs, "advantages": advantages}
    known |= {"ref_logprobs": ref_logprobs} if kl_coef else {}
    new, old, advantage, *ref = _kept(response_mask, refuse_nan, logprobs=logprobs, **known)
    objective, _ = _clipped_surrogate(new, old, advantage, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    if kl_coef != 0:
        kl = KL[kl_estimator](new, *ref)
        kl = kl * (new - old).exp() if kl_corrected else kl
        objective = objective - kl_coef * (kl if has_reference is None else torch.where(has_reference, kl, 0.0))
    if loss_scales is not None:
        objective = objective * loss_scales[:, None]
    return -objective.sum() / num_tokens


@dataclass(frozen=True)
class TokenWeights:
    """Eq. 2's factor on ∇ log π of each token, split into policy and KL part; 0 on masked tokens."""

    policy: Float[Tensor, "B T"]
    """r · Â · I_trust, without 1/num_tokens."""
    kl: Float[Tensor, "B T"]
    """−kl_coef · ∂KL/∂log π, the pull towards the reference: kl_coef · (π_ref/π − 1) for k3, kl_coef · r · log(π_ref/π)
    with kl_corrected."""
    clipped: Bool[Tensor, "B T"]
    """True where I_trust is 0, so that the policy part vanishes."""

    @property
    def total(self) -> Float[Tensor, "B T"]:
        """Eq. 2's w_t, the sum of both parts."""
        return self.policy + self.kl


@torch.no_grad()
def token_weight_parts(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Advantages,
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_ratio_low: Number,
    clip_ratio_high: Number,
    clip_ratio_c: Number | None = None,
    ref_logprobs: Float[Tensor, "B T"] | None = None,
    kl_coef: Number = 0.0,
    kl_corrected: bool = False,
    kl_estimator: Estimator = "k3",
    num_tokens: Number,
    has_reference: Bool[Tensor, "B T"] | None = None,
    loss_scales: Float[Tensor, " B"] | None = None,
    refuse_nan: bool = True,
) -> TokenWeights:
    """Compute Eq. 2's weights in closed form: −num_tokens · ∂policy_loss/∂logprob, split into policy and KL part.

    The weights do not depend on `num_tokens`; it is here so that loss and weights take the same arguments.
    """
    _check_settings(clip_ratio_low, clip_ratio_high, clip_ratio_c, kl_coef, ref_logprobs, num_tokens)
    check_estimator(kl_estimator)
    known = {"old_logprobs": old_logprobs, "advantages": advantages}
    known |= {"ref_logprobs": ref_logprobs} if kl_coef else {}
    new, old, advantage, *ref = _kept(response_mask, refuse_nan, logprobs=logprobs, **known)
    surrogate, clipped = _clipped_surrogate(new, old, advantage, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    kl = torch.zeros_like(new)
    if kl_coef != 0:
        (ref,) = ref
        slope = kl_slope(new, ref, kl_estimator)
        if kl_corrected:  # d(r·k)/d log π = r·k + r·dk/d log π; of k3 that is −r·log(π_ref/π), without cancellation
            whole = new - ref if kl_estimator == "k3" else KL[kl_estimator](new, ref) + slope
            slope = whole * (new - old).exp()
        pulled = response_mask if has_reference is None else response_mask & has_reference
        kl = torch.where(pulled, -kl_coef * slope, 0.0)
    # Where it is not clipped, r·Â is its own derivative with respect to log π.
    policy = surrogate.masked_fill(clipped, 0.0)
    if loss_scales is not None:
        policy, kl = policy * loss_scales[:, None], kl * loss_scales[:, None]
    return TokenWeights(policy, kl, clipped)


@checked
def token_weights(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Advantages,
    response_mask: Bool[Tensor, "B T"],
    **settings: Any,
) -> Float[Tensor, "B T"]:
    """Compute Eq. 2's w_t = −num_tokens · ∂policy_loss/∂logprob_t in closed form; 0 on masked tokens.

    `settings` are the keyword arguments of `policy_loss`; `token_weight_parts` separates policy and KL.

    >>> logprobs, mask = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[True, False]])
    >>> clips = dict(clip_ratio_low=0.2, clip_ratio_high=0.24)
    >>> token_weights(logprobs, logprobs, torch.tensor([-1.5]), mask, **clips, num_tokens=1)
    tensor([[-1.5000,  0.0000]])
    """
    return token_weight_parts(logprobs, old_logprobs, advantages, response_mask, **settings).total


def _clipped_surrogate(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    low: Number,
    high: Number,
    dual: Number | None,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return Eq. 1's min(r·Â, clip(r)·Â), at least dual·Â where Â < 0, and the mask of clipped tokens (I_trust = 0)."""
    ratio = (logprobs.detach() - old_logprobs).exp()
    clipped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    largest = torch.finfo(ratio.dtype).max  # torch takes no bounds beyond the dtype's range
    edge = ratio.clamp(1 - low, min(1 + high, largest))
    if dual is not None:
        beyond = (advantages < 0) & (ratio > dual)
        clipped, edge = clipped | beyond, edge.masked_fill(beyond, min(dual, largest))
    # Mask the log ratio, not only the product: a clipped ratio that overflows would have gradient 0 · inf = NaN.
    trusted = torch.where(clipped, 0.0, logprobs - old_logprobs).exp() * advantages
    return torch.where(clipped, edge * advantages, trusted), clipped


def _kept(mask: Bool[Tensor, "B T"], refuse_nan: bool, **tensors: Tensor) -> list[Tensor]:
    """Return [B, T] tensors, 0 at masked tokens (ratio 1, advantage 0, k3 0), all but `logprobs` detached."""
    if refuse_nan:
        check_known(mask, **tensors)
    own = {name: tensor if name == "logprobs" else tensor.detach() for name, tensor in tensors.items()}
    return [torch.where(mask, _per_token(tensor), 0.0) for tensor in own.values()]


def _per_token(tensor: Float[Tensor, " B"] | Float[Tensor, "B T"]) -> Tensor:
    """Return [B, T] unchanged and [B] as a column that broadcasts over tokens."""
    return tensor if tensor.ndim == 2 else tensor.unsqueeze(-1)


def _float_dtype(rewards: Rewards) -> torch.dtype:
    """Return the rewards' dtype, or torch's default for integer rewards."""
    return rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()


def check_estimator(name: str) -> None:
    """Raise InputError for a name of no estimator of KL."""
    if name not in KL:
        raise InputError(f"kl_estimator is {name!r}; give one of {', '.join(KL)}")


def check_clipping(low: Number, high: Number, dual: Number | None) -> None:
    """Raise InputError for clip settings outside Eq. 1's range."""
    if not (0 <= low <= 1 and high >= 0):
        raise InputError(f"clip_ratio_low is {low}, clip_ratio_high {high}; give 0 ≤ low ≤ 1 and high ≥ 0")
    if dual is not None and not dual > 1:
        raise InputError(f"clip_ratio_c is {dual}; the dual clip caps ratios above 1; give a number > 1, or None")


def _check_settings(
    low: Number, high: Number, dual: Number | None, kl_coef: Number, ref_logprobs: Tensor | None, num_tokens: Number
) -> None:
    check_clipping(low, high, dual)
    if kl_coef != 0 and ref_logprobs is None:
        raise InputError(f"kl_coef is {kl_coef} without ref_logprobs; the KL term needs them; give them or kl_coef=0")
    if not num_tokens > 0:
        raise InputError(f"num_tokens is {num_tokens}; the loss is divided by it; give the mini-batch's token count")


def check_known(mask: Bool[Tensor, "B T"], **tensors: Tensor) -> None:
    """Raise InputError if a kept token's entry is NaN."""
    counts = torch.stack([(_per_token(tensor).isnan() & mask).sum() for tensor in tensors.values()]).tolist()
    for name, count in zip(tensors, counts, strict=True):
        if count:
            raise InputError(f"{name} is NaN at {count} kept token(s); give a number at each, or mask them")


def _refuse_nonfinite(tensor: Tensor, name: str) -> None:
    """Raise InputError if an entry is NaN or infinite."""
    if count := int((~tensor.isfinite()).sum()):
        raise InputError(f"{name} has {count} value(s) that are NaN or infinite; give finite numbers")
