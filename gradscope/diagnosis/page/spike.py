"""Lay out a step whose gradient norm is out of line as one page, and say it in a line."""

from __future__ import annotations

import math

from gradscope.diagnosis.page.contents import Report
from gradscope.diagnosis.page.page import Definition, Finding, Page, Paragraph, Section, Tile
from gradscope.diagnosis.page.sheets import Sheets
from gradscope.updates import Spike

TOLERANCE = 0.05
"""Largest distance of the shares' sum from 1 that goes unmentioned."""
SHOWN = (
    *("text", "before", "gradient_share", "term_norm", "prob", "ratio", "advantage", "reward"),
    *("response", "position", "group"),
)
SETS = {"odd": "the tokens that are not finite", "tokens": "the largest", "response": "a response", "group": "a prompt"}
"""What was left out → words."""
LABELS = {
    **{"term_norm": "‖w g‖/N", "text": "token", "before": "text before it", "group": "prompt", "ratio": "π/π_old"},
    **{"left": "left of their Σ|w|", "norm": "gradient norm", "what": "left out", "tokens": "number of tokens"},
}
NEXT = {
    "precision": "The trainer's own precision overflows: train in bfloat16 or float32, or with a smaller loss scale.",
    "weights": "An earlier step broke the weights: go back to a checkpoint before it, and look at that step.",
}
"""What is not finite → what to do."""
SHARE = (
    "c_t = −w_t⟨g_t, G⟩/(N‖G‖²), with G the gradient of the step, g_t that of the token's log π and w_t its weight in "
    "the loss. Shares of all tokens sum to 1; they may be negative, and exceed 1 where large terms cancel. The norm "
    "without some tokens is that of the sum of all others, not the share taken off."
)


def describe_spike(spike: Spike, typical: float | None) -> str:
    """Return the step in a line: the norm, what makes it, the norm without, and what would have removed it."""
    times = (
        ""
        if not typical or not math.isfinite(spike.norm)
        else f", {spike.norm / typical:.3g} × the usual {typical:.3g}"
    )
    return f"gradient norm {spike.norm:.4g}{times}: {'; '.join([*_causes(spike), *_remedies(spike)])}."


def make_spike_report(
    spike: Spike,
    *,
    title: str,
    typical: float | None = None,
) -> Report:
    """Lay out a step as a page. typical: the usual norm; None: unknown."""
    sheets = Sheets(LABELS)
    tokens = spike.tokens.dropna(axis=1, how="all")
    caption = "The tokens with the largest shares of the gradient, and those with the largest terms."
    blocks = [sheets.table("spike_tokens", tokens, caption, SHOWN), Definition("share of the gradient", SHARE)]
    left = spike.without.assign(what=spike.without["what"].map(SETS))
    line = "any finite norm" if math.isinf(spike.line) else f"{spike.line:.4g}"
    caption = f"The norm of what remains without these tokens, up to the first set that brings it in line ({line})."
    sections = [
        Section("tokens-of-the-step", "Which tokens made it?", tuple(blocks)),
        Section("without", "What is the norm without them?", (sheets.table("spike_without", left, caption),)),
    ]
    caption = (
        "Losses under which at most a tenth of these tokens' Σ|w| is left, and the norm of the step under each, with "
        "the same averaging. clip: GRPO's, .2 below and .24 above 1, and 10 for negative advantages."
    )
    found = sheets.table("spike_remedies", spike.remedies.rename(columns={"left": "left_share"}), caption)
    nothing = Paragraph(
        "No clip, mask or weighting of the registry removes them: none looks at what they have in common."
    )
    sections.append(Section("remedies", "What would have removed them?", (found if len(spike.remedies) else nothing,)))
    said = [
        Finding(f"{each[:1].upper()}{each[1:]}.", tone="bad" if k == 0 else "plain")
        for k, each in enumerate(_causes(spike))
    ]
    said += [Finding(f"{each[:1].upper()}{each[1:]}.") for each in _remedies(spike)]
    tiles = [Tile("gradient norm", f"{spike.norm:.4g}", "before clipping")]
    tiles += [] if typical is None else [Tile("usual norm", f"{typical:.4g}", "median of the steps before")]
    tiles += [Tile("without them", f"{spike.without['norm'].iloc[-1]:.4g}", _named(spike))] if spike.found else []
    page = Page(title=title, findings=tuple(said), sections=tuple(sections), tiles=tuple(tiles), next=_next(spike))
    return Report(page, sheets.tables)


def _causes(spike: Spike) -> list[str]:
    """Say what makes the norm, and what it is without."""
    said, it = [], "it" if _is_one(spike) else "them"
    if spike.found:
        share, rest = spike.without[["gradient_share", "norm"]].iloc[-1]
        has = f"{_named(spike)} {'has' if _is_one(spike) else 'have'} {share:.0%} of it"
        said.append(f"{has if spike.nonfinite is None else spike.nonfinite.words}; without {it} the norm is {rest:.4g}")
    elif spike.nonfinite is not None:
        said.append(spike.nonfinite.words)
    else:
        best = spike.without.loc[spike.without["norm"].idxmin()]
        said.append(
            "it is no few tokens', no single response's and no single prompt's: at best it is "
            f"{best['norm']:.4g}, without {SETS[best['what']]}"
        )
    if abs(spike.explained - 1) > TOLERANCE:
        said.append(
            f"the tokens' weights give {spike.explained:.0%} of the trainer's gradient, and the rest goes another way "
            "than through their log π"
        )
    return said


def _remedies(spike: Spike) -> list[str]:
    good = spike.remedies[spike.remedies["norm"] <= spike.line][:4]
    if not spike.found or good.empty:
        return []
    each = ", ".join(f"{row.weighting} (norm {row.norm:.3g})" for row in good.itertuples())
    return [f"{'it' if _is_one(spike) else 'they'} would have been removed by {each}"]


def _named(spike: Spike) -> str:
    """Name the culprits."""
    what, count = spike.without["what"].iloc[-1], int(spike.without["tokens"].iloc[-1])
    first = next(spike.tokens[spike.culprits[spike.tokens["token"]]].itertuples())
    if what in ("response", "group"):
        return f"{'response' if what == 'response' else 'prompt'} {getattr(first, what)} ({count} tokens)"
    ratio = "" if math.isnan(first.ratio) else f", ratio {first.ratio:.3g}"
    told = (
        f"{first.text!r} at position {first.position} of response {first.response} (π {first.prob:.2g}{ratio}, "
        f"advantage {first.advantage:.3g})"
    )
    return told if count == 1 else f"{count} tokens, first {told},"


def _is_one(spike: Spike) -> bool:
    return spike.without["what"].iloc[-1] in ("response", "group") or int(spike.without["tokens"].iloc[-1]) == 1


def _next(spike: Spike) -> tuple[str, ...]:
    if spike.nonfinite is not None and spike.nonfinite.kind in NEXT:
        return (NEXT[spike.nonfinite.kind],)
    if not spike.found:
        return ("The whole batch moved: look at the learning rate, the rewards, and the steps before this one.",)
    return (
        "Read the tokens above in their text: a broken tokenization, a reward without a bound or an old log π of "
        "another policy shows there.",
        "If they are meant to be there, train with one of the losses above, or clip the gradient's norm.",
    )
