"""How a group of tokens' share of the gradient depends on the batch's size, in closed form.

Prompts p are drawn from one distribution, with gradients G_p of mean μ; g_pa is the part of the tokens a, of mean μ_a.
For the sum G over N prompts and the part G_a of it,

    E‖G‖² = N·[(N − 1)·s + C],        E⟨G_a, G⟩ = N·[(N − 1)·s_a + C_a]

with the signal s = ‖μ‖², s_a = ⟨μ_a, μ⟩ and the own part C = E‖G_p‖², C_a = E⟨g_pa, G_p⟩, all of one prompt, as
`Contributions.grouped` estimates them. Shares here are ratios of expectations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Number = int | float


@dataclass(frozen=True)
class BatchShare:
    """The share of the tokens a in the gradient of N prompts: [(N − 1)·s_a + C_a] / [(N − 1)·s + C].

    It is C_a/C for one prompt and goes monotonically to the share of the signal, s_a/s, without crossing it.
    """

    signal: Number
    """s_a."""
    own: Number
    """C_a."""
    whole_signal: Number
    """s. Unless it is positive, the share has no limit and no crossing."""
    whole_own: Number
    """C, at least s."""

    def at(self, prompts: Number) -> float:
        """Return the share in a batch of N prompts.

        >>> [BatchShare(2.0, 10.0, 4.0, 100.0).at(n) for n in (1, 26)]
        [0.1, 0.3]
        """
        others = prompts - 1
        return (others * self.signal + self.own) / (others * self.whole_signal + self.whole_own)

    @property
    def limit(self) -> float:
        """The share of the signal, s_a/s.

        >>> BatchShare(2.0, 10.0, 4.0, 100.0).limit
        0.5
        """
        return self.signal / self.whole_signal if self.whole_signal > 0 else math.nan

    def crossing(self, level: Number) -> float | None:
        """Return the number of prompts N* = 1 + (C_a − τ·C)/(τ·s − s_a) at which the share is τ; None: at none.

        >>> rare = BatchShare(2.0, 10.0, 4.0, 100.0)
        >>> rare.crossing(0.3), rare.at(26)
        (26.0, 0.3)
        >>> rare.crossing(0.5), rare.crossing(0.05)  # never beyond the limit, and below a single prompt's
        (None, None)
        """
        if not self.whole_signal > 0:
            return None
        missing, speed = self.own - level * self.whole_own, level * self.whole_signal - self.signal
        prompts = 1 + missing / speed if speed else math.nan
        return prompts if prompts >= 1 else None


def noise_scale(signal: Number, own: Number) -> float:
    """Return B = (C − s)/s, the number of prompts whose sum has as much noise as signal; infinite without signal.

    The share of tokens a in a batch of N prompts is the share of the signal s_a/s with weight N and that of the noise,
    (C_a − s_a)/(C − s), with weight B.

    >>> noise_scale(4.0, 100.0)
    24.0
    """
    return (own - signal) / signal if signal > 0 else math.inf
