"""What the words of a diagnosis mean, in sentences that a page can quote."""

DEFINITIONS = {
    "probability interval": (
        "Response tokens are sorted by π, the probability that the policy gives the token at the sampling temperature, "
        "into intervals with fixed edges, not quantiles: π < ¼, ¼ ≤ π < ½, ½ ≤ π < ¾ and π ≥ ¾ unless others are shown."
    ),
    "share of the tokens": "An interval's response tokens over all response tokens of the rollouts.",
    "w": (
        "The weight of a token in the loss's gradient (Eq. 2 of the paper): the clipped ratio times the advantage, "
        "plus the KL term's part. Where a group's rewards are all equal, only the KL part is left."
    ),
    "gradient energy": (
        "Σ‖w·g‖²: g is the gradient of one token's own log π over all parameters, or over those of an adapter that "
        "is measured by itself, w its weight in the loss. The squared norms are added up over an interval's tokens; "
        "a share is of the sum over all tokens. It tells how large tokens' gradients are one by one, and knows "
        "nothing of gradients that cancel."
    ),
    "summed gradient": (
        "G_a is the gradient of the loss over an interval's tokens, G the whole gradient. An interval's share is "
        "⟨G_a, G⟩/‖G‖²: shares add up to 100 % and may be negative. It differs from the share of the gradient "
        "energy: tokens whose gradients cancel have no part in it."
    ),
    "dominance index": (
        "log₂ of an interval's share of the gradient energy over its share of the tokens, in bits: 0 is "
        "proportional, +1 twice, −1 half the average per token. Tokens dominate only if its 95 % confidence "
        "interval lies above 0 and their probability interval has the largest share in 95 % of the redrawn batches."
    ),
    "redrawn batches": (
        "Batches of as many prompts, drawn with replacement from those that are here: how often a ranking holds in "
        "them shows how much it depends on the choice of prompts. In fewer than 95 %, it is called undecided."
    ),
    "(1−π)² alone": (
        "Gradient energy with |w|·(1−π) for ‖w·g‖, as if the network scaled all tokens' gradients equally: "
        "what the probabilities and weights predict without any gradient."
    ),
    "index of the summed gradients": "log₂ of an interval's share of Σ_a ‖G_a‖² over its share of the tokens, in bits.",
    "signal fraction": (
        "Prompts are taken as draws of one distribution. Signal is the unbiased estimate of ‖E G_a‖², the part of the "
        "squared norm that another batch of as many prompts shares, and noise the rest; the fraction is signal/‖G_a‖², "
        "about the cosine to be expected with the G_a of such another batch. The estimate can fall below 0."
    ),
    "AdamW-preconditioned": (
        "Each gradient divided by √v̂ + eps, entry by entry, as the optimizer's next update divides it; v̂ is that of "
        "the whole step. Momentum of earlier steps and weight decay are left out."
    ),
    "influence between intervals": (
        "To first order, a step changes each token's log π by a sum with a part per source: the gradients of the "
        "intervals, KL, momentum, decay. A source's share is Cov(its part, the whole)/Var(the whole) over the tokens "
        "that are moved; shares add up to 1 and may be negative. Intervals here are of π before the step."
    ),
    "right direction": (
        "Of the tokens with a positive advantage that moved, the share whose probability rose in the step; of those "
        "with a negative one, the share whose probability fell. One half is what chance would give. Responses that "
        "share a prefix and differ in reward pull the same token both ways, so some wrong directions are unavoidable."
    ),
    "Prop. 4.2": (
        "√(N/(N−1))·(1−π) ≤ ‖e − π‖ ≤ √2·(1−π) for the gradient with respect to the logits. A theorem: a violation "
        "would be a fault of the measurement."
    ),
    "off-policy": (
        "|log π − log π_old| of the policy here and the one that sampled, over tokens whose log π_old is in the "
        "rollouts, in nats; clipped low: Â < 0 and π/π_old < 1 − ε_low; clipped high: Â > 0 and π/π_old > 1 + ε_high. "
        "Shares of these tokens."
    ),
    "95 % interval": (
        "Brackets hold percentiles of a bootstrap that redraws whole prompts or, below 50 prompts and where a sample "
        "of tokens was measured, a jackknife over prompts; those of summed gradients are corrected for the bias that "
        "redrawing has. For signal they are a jackknife over prompts. They show how much the choice of prompts and of "
        "measured tokens matters; where either are too few, there are none."
    ),
}
"""Term → its definition."""
