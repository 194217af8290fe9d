"""The KL penalty's own gradient, and the tokens that hold it."""

from __future__ import annotations

from math import exp

from gradscope.diagnosis.findings import Finding, Verdict
from gradscope.diagnosis.format import percent
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows
from gradscope.diagnosis.terms import energy_factors
from gradscope.gradients import PARAMETERS
from gradscope.runs import digits

TITLE = "The KL penalty"
ASKS = ("table",)
NAMED = 5
"""Number of the largest tokens to name."""
PULLING = 0.01
"""Share of the gradient energy above which the penalty's is mentioned."""


def rows(m: Measured) -> Rows:
    """kl: the tokens with the largest |w_KL|·‖g‖, where the penalty has more than PULLING of the loss's energy."""
    table = m.table
    if m.weighted and m.settings.loss.kl_coef and table["ref_logprob"].isna().any():
        m.note("no-kl", "Some or all reference log-probabilities are unknown; these tokens have no KL part.")
    if "kl_weight" not in table or not table["kl_weight"].any():
        return Rows()
    squares = table[["kl_weight", "weight"]].mul(table[PARAMETERS], axis=0).astype(float) ** 2
    own, whole = (float((squares[name] * energy_factors(table, name)).sum()) for name in squares)
    if not own > PULLING * whole:
        return Rows()
    first = table.assign(squared_share=squares["kl_weight"] / own).nlargest(NAMED, "squared_share")
    return Rows(frames={"kl": first[first["squared_share"] > 0]}, kept={"own": own, "whole": whole})


def say(found: Diagnosis) -> list[Finding]:
    """Say how much of the loss's energy the penalty has, if it is enough to matter."""
    if (first := found.frames.get("kl")) is None:
        return []
    own, whole = (found.rows["kl"].kept[name] for name in ("own", "whole"))
    statement = (
        f"The KL penalty alone has {percent(own / whole)} % of the loss's gradient energy; "
        f"{len(first)} token{'s hold' if len(first) > 1 else ' holds'} {percent(first['squared_share'].sum())} % of it."
    )
    told = "; ".join(
        f"{token['token']!r} in response {token['response']} (π {digits(token['prob'])}, "
        f"π_ref {digits(exp(token['ref_logprob']))}; {percent(token['squared_share'])} %)"
        for _, token in first.iterrows()
    )
    tone = "warn" if own > whole else "plain"
    return [Finding("kl", Verdict.FACT, statement, f"The largest: {told}.", tone)]
