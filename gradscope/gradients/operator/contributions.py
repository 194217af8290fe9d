"""Each token's part of ‖G‖²: its product with its own prompt's gradient, and with the other prompts'.

With G = Σ_t w_t·g_t over all kept tokens and G_p over those of prompt p,

    along_t = w_t⟨g_t, G⟩,        Σ_t along_t = ‖G‖²
    own_t = w_t⟨g_t, G_p(t)⟩,     Σ_{t in p} own_t = ‖G_p‖²
    signal_t = n/(n−1)·(along_t − own_t)

For n prompts drawn from one distribution the sum of the signal over any tokens a is unbiased for ⟨E G_a, E G⟩, and over
all tokens for ‖E G‖². All are sums over tokens, so every grouping of tokens is arithmetic on three columns.

**Bounds** leave out one fold of prompts at a time. With G_{F_j} the sum over the prompts of fold j and
f_tj = w_t⟨g_t, G_{F_j}⟩, the products of the tokens a outside fold k with the other prompts outside it sum to, exactly,

    U_a without k = Σ_{t in a outside F_k} (Σ_{j≠k} f_tj − own_t)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.resampling import bound_products_by_folds, bound_shares_by_folds, fold_errors, short_of


@dataclass(frozen=True, eq=False)
class Contributions:
    """What each of K kept tokens holds of ‖G‖²; see the module. Float64, on the CPU, in the order of J's rows.

    Units are those of the squared weights: with w_t as in Eq. 2, divide by num_tokens² for the loss's gradient.
    """

    along: Float[Tensor, " K"]
    """w_t⟨g_t, G⟩."""
    own: Float[Tensor, " K"]
    """w_t⟨g_t, G_p⟩ with the token's own prompt p."""
    prompts: Int[Tensor, " K"]
    """Index of the token's prompt, 0 … n − 1, by ascending id."""
    num_prompts: int
    """n: the prompts with kept tokens, also where all weights are 0."""
    self_check: float
    """Largest relative difference between Σ_{t in p} own_t and ‖G_p‖², over prompts."""
    by_fold: Float[Tensor, "F K"] | None = None
    """f_tj = w_t⟨g_t, G_{F_j}⟩ for each fold j; they sum to `along`."""
    folds: Int[Tensor, " n"] | None = None
    """Fold of each prompt."""
    scaled: Contributions | None = None
    """The same in AdamW's metric, if it was asked for beside."""

    @property
    def square_norm(self) -> float:
        """‖G‖²."""
        return float(self.along.sum())

    @property
    def squares(self) -> Float[np.ndarray, " n"]:
        """‖G_p‖² of each prompt."""
        return np.bincount(self.prompts.numpy(), self.own.numpy(), minlength=self.num_prompts)

    @property
    def gradient_share(self) -> Float[Tensor, " K"]:
        """c_t = w_t⟨g_t, G⟩/‖G‖²: each token's share of the batch's gradient; they sum to 1 and may be negative."""
        return self.along / self.square_norm

    @property
    def own_share(self) -> Float[Tensor, " K"]:
        """w_t⟨g_t, G_p⟩/‖G‖²: the part of `gradient_share` that is a product with the token's own prompt."""
        return self.own / self.square_norm

    @property
    def signal(self) -> Float[Tensor, " K"]:
        """s_t = n/(n−1)·(w_t⟨g_t, G⟩ − w_t⟨g_t, G_p⟩), which sum to the estimate of ‖E G‖²; NaN for one prompt."""
        per_freedom = self.num_prompts / (self.num_prompts - 1) if self.num_prompts > 1 else float("nan")
        return per_freedom * (self.along - self.own)

    def grouped(self, labels: Int[Tensor, " K"], size: int | None = None) -> GroupSignals:
        """Sum by any grouping of the tokens.

        Args:
            labels: group of each token, 0 … A − 1.
            size: A; None: the largest label and one.

        Raises:
            InputError: the labels do not fit.
        """
        labels = np.asarray(labels)
        size = (int(labels.max()) + 1 if len(labels) else 0) if size is None else size
        if labels.shape != (len(self.along),) or not np.isin(labels, np.arange(size)).all():
            raise InputError(
                f"labels are of shape {[*labels.shape]}, for {size} groups; give each of {len(self.along)} tokens one "
                f"from 0 to {size - 1}"
            )
        n, along, own = self.num_prompts, self.along.numpy(), self.own.numpy()

        def add(values: Float[np.ndarray, " K"], cells: Int[np.ndarray, " K"], count: int) -> np.ndarray:
            """Sum by group and cell, and over all groups: [A + 1, count]."""
            found = np.bincount(labels * count + cells, values, minlength=size * count).reshape(size, count)
            return np.vstack([found, found.sum(0)])

        touched = add((own != 0).astype(float), self.prompts.numpy(), n) > 0
        with np.errstate(invalid="ignore", divide="ignore"):  # a single prompt
            signal = add(along - own, np.zeros_like(labels), 1)[:, 0] / np.float64(n * (n - 1))
        owned = add(own, np.zeros_like(labels), 1)[:, 0] / n
        if self.folds is None:
            return GroupSignals(signal, owned, n, touched.sum(1))
        count, of = len(self.by_fold), self.folds[self.prompts].numpy()
        table = np.stack([add(values, of, count) for values in self.by_fold.numpy()], 2)  # [A + 1, F of tokens, F]
        within, left = add(own, of, count), n - np.bincount(self.folds.numpy(), minlength=count)
        everything = table.sum((1, 2))[:, None] - table.sum(1) - table.sum(2) + np.einsum("akk->ak", table)
        rest = within.sum(1, keepdims=True) - within
        left_out = ((everything - rest) / (left * (left - 1))).T, (rest / left).T, self.squares
        return GroupSignals(signal, owned, n, touched.sum(1), *left_out)


@dataclass(frozen=True, eq=False)
class GroupSignals:
    """Signal and own part of A groups of tokens and, last, of all tokens, in units of one prompt.

    G_p is one prompt's gradient, g_pa its part over the tokens a, and μ_a = E g_pa, μ = E G_p. A batch of n prompts has
    n² times the signal and n times the own part.
    """

    signal: Float[np.ndarray, " A1"]
    """s_a, unbiased for ⟨μ_a, μ⟩; last ‖μ‖². May be negative; NaN for one prompt."""
    own: Float[np.ndarray, " A1"]
    """C_a, unbiased for E⟨g_pa, G_p⟩; last E‖G_p‖²."""
    num_prompts: int
    touched: Int[np.ndarray, " A1"]
    """Number of prompts with a gradient there."""
    left_signal: Float[np.ndarray, "F A1"] | None = None
    """`signal` of the prompts outside each fold."""
    left_own: Float[np.ndarray, "F A1"] | None = None
    """`own` of the prompts outside each fold."""
    squares: Float[np.ndarray, " n"] | None = None
    """‖G_p‖² of each prompt."""

    def signal_errors(self) -> Float[np.ndarray, " A1"]:
        """Return the standard errors of `signal` by a delete-a-fold jackknife; InputError without folds."""
        return fold_errors(self._left(self.left_signal))

    def signal_bounds(self, confidence: float = 0.95) -> Float[np.ndarray, "3 A1"]:
        """Return `signal` with lower and upper bounds, over folds (`bound_products_by_folds`).

        Bounds of 95 % hold in at least 94 % of planted batches. They are NaN where fewer than six prompts have a
        gradient. Raises InputError without folds.
        """
        left, squares = self._left(self.left_signal), self._left(self.squares)
        found = bound_products_by_folds(self.signal, left, squares, confidence=confidence)
        return self._strike(found, self.touched)

    def share_bounds(self, confidence: float = 0.95) -> Float[np.ndarray, "3 A"]:
        """Return s_a/s, each group's share of the signal, with the ends of Fieller's set over folds.

        The ends are −inf and inf where the whole signal cannot be told from 0, as any share is then possible; the share
        itself is NaN where the whole signal is not positive. Bounds are NaN, or refused, as in `signal_bounds`. Those
        of 95 % hold in 95 to 99 % of planted batches.
        """
        left = self._left(self.left_signal)
        whole = self.signal[-1], left[:, -1]
        found = bound_shares_by_folds(self.signal[:-1], left[:, :-1], *whole, confidence=confidence)
        return self._strike(found, self.touched[:-1])

    def _left(self, values: np.ndarray | None) -> np.ndarray:
        if values is None:
            raise InputError("bounds leave out folds of prompts; give contributions(…, folds=8)")
        return values

    @staticmethod
    def _strike(found: Float[np.ndarray, "3 n"], touched: Int[np.ndarray, " n"]) -> Float[np.ndarray, "3 n"]:
        few = [short_of(prompts) is not None for prompts in touched]
        found[1:, few] = np.nan
        return found
