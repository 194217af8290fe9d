"""How a token weighting becomes optimizer steps: the tokens of each step, and the factors on advantages.

Advantage Reweighting and Lopti are Eq. 4 and Alg. 1 of arXiv:2505.12929. Everything depends on π_old, the policy before
the first step, and every step's loss is divided by the number of all response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.objective.equations import lopti_split, reweight

Number = int | float
Mask = Bool[Tensor, "B T"]
ORDERS = {"low-first": ("low", "high"), "high-first": ("high", "low")}
"""Orders of Lopti's two steps, by name: the paper's, and its ablation."""
CONTROLS = {"random-split": "lopti_eta", "permuted-weights": "reweight_alpha", "matched-norm": "reweight_alpha"}
"""Control → the setting that it is matched to."""


@dataclass(frozen=True)
class StepRule:
    """How a token weighting changes the plain loss; by default not at all. Raises InputError for bad values.

    Fields are named like the flags and the entries of configurations.
    """

    reweight_alpha: Number | None = None
    """α of Advantage Reweighting (Eq. 4); None: off."""
    lopti_eta: Number | None = None
    """η of Lopti (Alg. 1): two optimizer steps, one for the tokens with π_old < η, one for the others; None: off."""
    lopti_order: str = "low-first"
    """Order of the two steps: low-first (the paper's) or high-first."""
    mask_probs: tuple[Number, ...] | None = None
    """Exclude tokens with π_old in [low, high) from training; a high of 1 is inclusive."""
    control: Literal["random-split", "permuted-weights", "matched-norm"] | None = None
    """A matched control: random-split (Lopti's steps over a random split of the same sizes), permuted-weights
    (Reweight's factors in random order) or matched-norm (the plain gradient rescaled to Reweight's norm)."""

    def __post_init__(self) -> None:
        for name, use in (("reweight_alpha", "Reweight takes"), ("lopti_eta", "Lopti splits at")):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{name} is {value}; {use} a number from 0 to 1, or None to switch it off")
        if self.lopti_order not in ORDERS:
            raise InputError(f"lopti_order is {self.lopti_order!r}; give one of {', '.join(ORDERS)}")
        masked = (0, 0.5) if self.mask_probs is None else self.mask_probs
        if len(masked) != 2 or not 0 <= masked[0] < masked[1] <= 1:
            raise InputError(f"mask_probs is {self.mask_probs}; give two probabilities, the lower one first")
        if tuple(masked) == (0, 1):
            raise InputError("mask_probs is 0 to 1, which leaves no token to train on; give a part of that range")
        needed = CONTROLS.get(self.control)
        if needed and getattr(self, needed) is None:
            raise InputError(f"control {self.control} is matched to {needed}, which is off; give {needed}")
        if self.control == "random-split" and self.mask_probs is not None:
            raise InputError("mask_probs would change the sizes of random-split's steps; give only one of them")

    @property
    def chooses(self) -> bool:
        """Whether any optimizer step leaves out tokens."""
        return self.lopti_eta is not None or self.mask_probs is not None

    def advantages(
        self, advantages: Float[Tensor, " B"] | Float[Tensor, "B T"], old_logprobs: Float[Tensor, "B T"]
    ) -> Float[Tensor, " B"] | Float[Tensor, "B T"]:
        """Return the advantages for training: Â or, with Reweight, [α·π_old + (1 − α)]·Â."""
        if self.reweight_alpha is None:
            return advantages
        return reweight(advantages, old_logprobs, alpha=self.reweight_alpha)

    def groups(self, old_logprobs: Float[Tensor, "B T"], response_mask: Mask) -> list[tuple[str, Mask]]:
        """Return (name, tokens) of each optimizer step: all tokens, or Lopti's low and high."""
        groups = [("all", response_mask)]
        if self.lopti_eta is not None:
            split = lopti_split(old_logprobs, response_mask, eta=self.lopti_eta)
            masks = dict(zip(("low", "high"), split, strict=True))
            groups = [(name, masks[name]) for name in ORDERS[self.lopti_order]]
        return [(name, mask & ~self._masked(old_logprobs)) for name, mask in groups]

    def drawn_groups(
        self,
        old_logprobs: Float[Tensor, "B T"],
        response_mask: Mask,
        mini_batch_size: int,
        generator: torch.Generator,
    ) -> list[tuple[str, Mask]]:
        """Return `groups` or, for the control random-split, random groups of the same sizes in each mini-batch."""
        if self.control != "random-split":
            return self.groups(old_logprobs, response_mask)
        low, _ = lopti_split(old_logprobs, response_mask, eta=self.lopti_eta)
        split = random_split(low, response_mask, mini_batch_size, generator)
        masks = dict(zip(("low", "high"), split, strict=True))
        return [(f"random-{name}", masks[name]) for name in ORDERS[self.lopti_order]]

    def permuted_factors(
        self,
        old_logprobs: Float[Tensor, "B T"],
        response_mask: Mask,
        mini_batch_size: int,
        generator: torch.Generator,
    ) -> Float[Tensor, "B T"]:
        """Return Reweight's factors α·π_old + 1 − α (Eq. 4), permuted within each mini-batch; 1 at masked tokens."""
        factors = self.advantages(torch.ones_like(old_logprobs), old_logprobs)
        dealt = torch.ones_like(factors)
        for rows in torch.arange(len(factors)).split(mini_batch_size):
            mask = response_mask[rows]
            own = factors[rows][mask]
            dealt[rows] = dealt[rows].masked_scatter(mask, own[torch.randperm(len(own), generator=generator)])
        return dealt

    def weights(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the policy part of Eq. 2's w_t in each step, from columns of the table; 0 for tokens of other steps.

        columns: `policy_weight` of the plain loss, `old_logprob` (NaN: on-policy) and `logprob`, [K] each. Reweight's
        factor is positive, so the clipped tokens stay the same. Raises InputError for a control, which is random.
        """
        if self.control is not None:
            raise InputError(f"control {self.control} is random, so columns do not determine its weights; leave it out")
        plain, old, own = (
            torch.as_tensor(np.asarray(columns[n]))[None] for n in ("policy_weight", "old_logprob", "logprob")
        )
        old = torch.where(old.isnan(), own, old)
        weights = self.advantages(plain, old)
        groups = self.groups(old, torch.ones_like(old, dtype=torch.bool))
        return {name: torch.where(mask, weights, 0.0)[0].numpy() for name, mask in groups}

    def _masked(self, old_logprobs: Float[Tensor, "B T"]) -> Mask:
        """Return the mask of tokens with π_old in the excluded range."""
        if self.mask_probs is None:
            return torch.zeros_like(old_logprobs, dtype=torch.bool)
        low, high = self.mask_probs
        probs = old_logprobs.exp()
        return (probs >= low) & ((probs < high) | (high == 1))


def random_split(low: Mask, response_mask: Mask, mini_batch_size: int, generator: torch.Generator) -> tuple[Mask, Mask]:
    """Randomly split each mini-batch's response tokens into as many as `low` has there, and the rest."""
    chosen = torch.zeros_like(low)
    for rows in torch.arange(len(low)).split(mini_batch_size):
        places = response_mask[rows].nonzero()
        drawn = places[torch.randperm(len(places), generator=generator)[: int(low[rows].sum())]]
        chosen[rows[drawn[:, 0]], drawn[:, 1]] = True
    return chosen, response_mask & ~chosen
