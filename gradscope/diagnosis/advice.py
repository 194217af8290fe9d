"""What to do after a diagnosis: more minutes, more prompts, tokens to read, or nothing."""

from __future__ import annotations

from math import isnan

from gradscope.diagnosis.format import says_nothing, times
from gradscope.diagnosis.result import Diagnosis, Verdict
from gradscope.diagnosis.words import compare, more_tokens, reward_conflicts
from gradscope.runs import counted

TOKENS_NAMED = 5
"""Number of tokens with a reward conflict to name."""


def advise(d: Diagnosis) -> tuple[str, ...]:
    """Return what to do next, most urgent first; never empty."""
    told = (_more_of_it(d), _conflict(d), _explained(d), _separate(d))
    return tuple(filter(None, told)) or ("Nothing: this batch asks for no further measurement.",)


def _more_of_it(d: Diagnosis) -> str:
    """Say what a verdict takes, if there is none for lack of prompts or tokens."""
    index = d.pick("dominance_index", "raw", d.labels[0])
    if d.table["weight"].isna().any():
        return "Give advantages or rewards for every response: without them there is no update to look at."
    if index is None:
        return "Sample prompts whose responses earn unequal rewards: all responses to a prompt here earn the same."
    if d.supply.too_few:
        return f"For a verdict: {d.supply.wanted[:1].lower()}{d.supply.wanted[1:]}"
    if isnan(index["lower"]) and index["lacks"] == "tokens":
        wanted = more_tokens(d.supply)
        return f"For a verdict: {wanted[:1].lower()}{wanted[1:]}"
    return ""


def _conflict(d: Diagnosis) -> str:
    """Name the tokens that are raised in responses that one part of the reward rewards and another does not."""
    if d.spikes is None or d.spikes.empty:
        return ""
    lacking = reward_conflicts(d.spikes)
    if not lacking.to_numpy().any():
        return ""
    name = lacking.sum().idxmax()
    rows = d.spikes[lacking[name]]
    tokens = counted(len(rows), "token")
    each = ", ".join(f"{row['token']!r} (response {row['response']})" for _, row in rows.head(TOKENS_NAMED).iterrows())
    return f"Read {tokens} with a reward conflict, raised in responses whose {name} is 0 or less: {each}."


def _explained(d: Diagnosis) -> str:
    """Say where no interval's energy is told from what (1−π)² alone predicts, if the lowest's was judged."""
    rows = {label: d.pick("added_index", "raw", label) for label in d.labels}
    known = {label: row for label, row in rows.items() if row is not None and not isnan(row["lower"])}
    known = {label: row for label, row in known.items() if not says_nothing(row, "bits")}
    if d.supply.too_few or d.labels[0] not in known:
        return ""
    if any(compare(row, write=times) is not Verdict.UNDECIDED for row in known.values()):
        return ""
    which = (
        "No interval's energy" if len(known) == len(rows) else f"No energy of {counted(len(known), 'judged interval')}"
    )
    return (
        f"{which} differs detectably from what (1−π)² alone predicts: that needs no more measuring. "
        "TokenMonitor shows it at every step, from the trainer's own forward pass."
    )


def _separate(d: Diagnosis) -> str:
    """Say what separates the summed gradient from noise, where it was judged not to be."""
    signal = d.pick("signal_fraction", "raw", "all")
    if d.supply.too_few or signal is None or isnan(signal["lower"]) or compare(signal) is Verdict.MORE:
        return ""
    more = "sample more prompts from this checkpoint" if d.sums_prompts in (None, d.of_prompts) else "give more minutes"
    return f"Before comparing weightings, {more}: {d.summed_prompts} do not separate the summed gradient from noise."
