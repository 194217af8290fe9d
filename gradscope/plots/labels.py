"""Labels of columns and statistics in tables, figures and the page."""

from __future__ import annotations

LAYER = "act_grad_norm."
"""Prefix of the norm column of a layer."""
LABELS = {
    # Tokens.
    "prob": "π",
    "old_prob": "π before",
    "entropy": "entropy (nats)",
    "advantage": "advantage Â",
    "sign": "sign of Â",
    "weight": "weight w",
    "interval": "interval of π",
    "label": "interval of π",
    "param_grad_norm": "‖g‖",
    "param_grad_norm_adamw": "AdamW-preconditioned ‖g‖",
    "logit_grad_norm": "logits",
    "weighted_norm": "‖w·g‖",
    "num_tokens": "tokens",
    "num_measured": "measured tokens",
    "n": "tokens",
    # Statistics.
    "token_share": "share of the tokens",
    "squared_share": "share of the gradient energy",
    "gradient_share": "share of the summed gradient",
    "norm_ratio": "norm over the whole's",
    "group": "prompt",
    # Steps.
    "predicted": "predicted Δ log π",
    "mover": "pushed most by",
    "mover_change": "Δ log π by it",
    "entropy_change": "ΔH (nats)",
    # Weightings.
    "method": "weighting",
    "norm": "norm of the update",
    "cosine": "cosine with the baseline",
    "cosine_from_energies": "cosine from energies alone",
    "signal_to_noise": "signal to noise of a prompt",
    "right_sgd": "right direction, SGD",
    "right_adamw": "right direction, AdamW",
    "effective_share": "share of tokens that carry it",
    "effective_share_adamw": "share that carries it, AdamW",
    "zero_share": "share without weight",
    "gain": "gain on unseen prompts",
    "gain_difference": "minus the baseline's",
    "energy_share": "share of the gradient energy",
    "energy_share_adamw": "share of the AdamW-preconditioned energy",
}
"""Column or statistic → label, unless it is the name with blanks for underscores."""

METRICS = {"raw": "unpreconditioned", "adamw": "AdamW-preconditioned", "none": ""}
"""Metric → label."""


def label_of(name: str) -> str:
    """Return the label of a column or statistic: that of `LABELS`, or its name with blanks for underscores.

    >>> label_of("squared_share"), label_of("signal_to_noise_difference"), label_of("my_own_number")
    ('share of the gradient energy', 'signal to noise of a prompt, against the baseline', 'my own number')
    >>> label_of("act_grad_norm.0"), label_of("act_grad_norm.2")
    ('input of block 1', 'output of block 2')
    """
    if name.startswith(LAYER):
        block = name.removeprefix(LAYER)
        return "input of block 1" if block == "0" else f"output of block {block}"
    stem = name.removesuffix("_difference")
    if name not in LABELS and stem in LABELS:
        return f"{LABELS[stem]}, against the baseline"
    return LABELS.get(name, name.replace("_", " "))
