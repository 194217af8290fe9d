"""Definitions of the terms of a diagnosis, for quoting on a page."""

DEFINITIONS = {
    "probability interval": (
        "Response tokens are grouped by π, the policy's probability of the token at the sampling temperature, into "
        "intervals with fixed edges (not quantiles): π < ¼, ¼ ≤ π < ½, ½ ≤ π < ¾ and π ≥ ¾ unless others are shown."
    ),
    "share of the tokens": "The fraction of all response tokens that are in the interval.",
    "w": (
        "The weight of a token in the loss's gradient (Eq. 2 of the paper): the clipped ratio times the advantage, "
        "plus the KL term's contribution. If a group's rewards are all equal, only the KL contribution is left."
    ),
    "gradient energy": (
        "Σ‖w·g‖², where g is the gradient of a single token's log π with respect to all parameters (or those of an "
        "adapter, if only that is measured), and w the token's weight in the loss. An interval's share is its sum of "
        "squared norms divided by the sum over all tokens. It measures the size of individual gradients, and ignores "
        "that gradients can cancel."
    ),
    "summed gradient": (
        "G_a is the gradient of the loss over an interval's tokens, G the whole gradient. An interval's share is "
        "⟨G_a, G⟩/‖G‖². Shares add up to 100 % and may be negative. Unlike the gradient energy, gradients that cancel "
        "do not contribute."
    ),
    "dominance index": (
        "log₂ of an interval's share of the gradient energy over its share of the tokens, in bits: 0 means "
        "proportional, +1 twice and −1 half the average per token. Tokens dominate only if its 95 % confidence "
        "interval lies above 0 and their interval has the largest share in 95 % of the redrawn batches."
    ),
    "redrawn batches": (
        "Batches with the same number of prompts, drawn with replacement from those given (a bootstrap). How often a "
        "ranking holds in them shows how much it depends on the choice of prompts; below 95 %, it is called undecided."
    ),
    "(1−π)² alone": (
        "The gradient energy with ‖w·g‖ replaced by |w|·(1−π), as if the network scaled all tokens' gradients "
        "equally: the prediction from probabilities and weights alone."
    ),
    "index of the summed gradients": "log₂ of an interval's share of Σ_a ‖G_a‖² over its share of the tokens, in bits.",
    "signal fraction": (
        "With prompts as draws from one distribution, signal is the unbiased estimate of ‖E G_a‖², the part of the "
        "squared norm that another batch of equally many prompts would share; the rest is noise. The fraction is "
        "signal/‖G_a‖², roughly the expected cosine with the G_a of such a batch. The estimate can fall below 0."
    ),
    "AdamW-preconditioned": (
        "Gradients divided entry by entry by √v̂ + eps, as in the optimizer's next update, with v̂ of the whole step. "
        "Momentum from earlier steps and weight decay are left out."
    ),
    "influence between intervals": (
        "To first order, a step changes each token's log π by a sum of contributions: from the gradient of each "
        "interval, KL, momentum and weight decay. A source's share is Cov(its contribution, the total)/Var(the total) "
        "over the affected tokens; shares add up to 1 and may be negative. Intervals here refer to π before the step."
    ),
    "right direction": (
        "Among tokens with a positive advantage that moved, the share whose probability rose in the step; among those "
        "with a negative advantage, the share whose probability fell. Chance gives one half. Responses that share a "
        "prefix but differ in reward pull the same token both ways, so some wrong directions are unavoidable."
    ),
    "Prop. 4.2": (
        "√(N/(N−1))·(1−π) ≤ ‖e − π‖ ≤ √2·(1−π) for the gradient with respect to the logits. This is a theorem, so a "
        "violation would be an error of the measurement."
    ),
    "off-policy": (
        "|log π − log π_old| in nats between this policy and the one that sampled, over tokens whose log π_old is in "
        "the rollouts. Clipped low: Â < 0 and π/π_old < 1 − ε_low; clipped high: Â > 0 and π/π_old > 1 + ε_high; as "
        "shares of these tokens."
    ),
    "95 % interval": (
        "Brackets hold percentiles of a bootstrap over prompts or, below 50 prompts or with a sample of tokens, a "
        "jackknife over prompts; for summed gradients they are corrected for resampling bias, and for signal they are "
        "always a jackknife. They show how much the choice of prompts and measured tokens matters; if there are too "
        "few of either, none is given."
    ),
}
"""Term → its definition."""
