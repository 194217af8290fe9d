"""A teacher's likeliest tokens in native rows: each at its token, as written, or a line that says why not."""

from __future__ import annotations

import math

import pytest
import torch
from support.policies import VOCAB, make_policy, make_responses, write_jsonl
from support.refusals import refused

from gradscope import read_rollouts
from gradscope.rollouts import collate, write_rollouts

IDS, LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """One to four candidates at each kept token; none at the others."""
    draw, made = torch.Generator().manual_seed(0), []
    for own in make_responses(make_policy("llama")):
        kept = own.response_mask or [True] * len(own.response_ids)
        counts = [(at % 4 + 1) * keep for at, keep in enumerate(kept)]
        names = ("prompt_ids", "response_ids", "response_mask", "reward", "group")
        row = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
        row[IDS] = [torch.randperm(VOCAB, generator=draw)[:count].tolist() for count in counts]
        values = [torch.rand(count, generator=draw, dtype=torch.float64).log() - 2 for count in counts]
        made.append(row | {LOGPROBS: [own.tolist() for own in values]})
    return made


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_candidates_stay_with_their_tokens_and_are_written_as_they_were_read(rows, suffix, tmp_path):
    policy = make_policy("llama")
    batch = read_rollouts(write_rollouts(tmp_path / f"rows{suffix}", rows), policy)
    assert batch.teacher_top_ids.shape == batch.teacher_top_logprobs.shape == (*batch.input_ids.shape, 4)
    for row, start, ids, logprobs in zip(rows, batch.response_start.tolist(), *batch.candidates, strict=True):
        found = torch.zeros(len(ids), dtype=torch.long)
        for at, (own, values) in enumerate(zip(row[IDS], row[LOGPROBS], strict=True)):
            known = logprobs[start + at] > -math.inf
            assert ids[start + at][known].tolist() == own and logprobs[start + at][known].tolist() == values
            found[start + at] = len(own)
        assert torch.equal((logprobs > -math.inf).sum(1), found)
    again = read_rollouts(write_rollouts(tmp_path / f"again{suffix}", batch), policy)
    assert again.digest() == batch.digest()


def test_what_a_server_did_not_score_is_no_candidate(rows):
    policy = make_policy("llama")
    changed = [dict(row) for row in rows]
    first = changed[0][LOGPROBS][1]
    changed[0][LOGPROBS] = [None, [first[0], None], *changed[0][LOGPROBS][2:]]
    changed[0][IDS] = [None, *changed[0][IDS][1:]]
    del changed[1][IDS], changed[1][LOGPROBS]
    batch, whole = (read_rollouts(each, policy) for each in (changed, rows))
    known, every = ((each.teacher_top_logprobs > -math.inf).sum(2) for each in (batch, whole))
    start = int(batch.response_start[0])
    every[0, start : start + 2] = torch.tensor([0, 1])
    every[1] = 0
    assert torch.equal(known, every)


def test_left_padding_keeps_candidates_at_their_tokens(rows):
    given = [make_responses(make_policy("llama"))[0], make_responses(make_policy("llama"))[1]]
    shape = len(given[0].response_ids), 2
    vars(given[0]).update({IDS: torch.arange(2).expand(shape).numpy(), LOGPROBS: torch.full(shape, -1.0).numpy()})
    batch = collate(given, side="left")
    there = (batch.teacher_top_logprobs == -1).all(2)
    own = batch.positions() >= 0
    assert torch.equal(there[0], own[0] & batch.attention_mask[0]) and not there[1].any()


def test_candidates_that_fit_no_token_are_refused_in_one_line(rows, tmp_path):
    policy, row = make_policy("llama"), rows[0]
    place = next(at for at, own in enumerate(row[IDS]) if len(own) > 1)

    def changed(name: str, value: object) -> dict:
        return {name: [value if at == place else own for at, own in enumerate(row[name])]}

    ids, logprobs = row[IDS][place], row[LOGPROBS][place]
    cases = (
        ({IDS: row[IDS][:-1]}, "response tokens"),
        (changed(IDS, ids[:-1]), "different lengths"),
        (changed(IDS, [VOCAB, *ids[1:]]), "vocabulary"),
        (changed(IDS, [-1, *ids[1:]]), "vocabulary"),
        (changed(IDS, [10**40, *ids[1:]]), "digits"),
        (changed(IDS, [ids[1], *ids[1:]]), "twice"),
        (changed(IDS, [0.5, *ids[1:]]), "list of numbers"),
        (changed(LOGPROBS, [0.5, *logprobs[1:]]), "logarithms"),
        (changed(LOGPROBS, [0.0] * len(logprobs)), "logarithms"),
        (changed(LOGPROBS, "none"), "list of numbers"),
        ({IDS: None}, "alone"),
    )
    for change, word in cases:
        own = {name: value for name, value in (row | change).items() if value is not None}
        with refused("row 0", word):
            read_rollouts(write_jsonl(tmp_path / "rows.jsonl", [own, *rows[1:]]), policy)
    place = row["response_mask"].index(False)
    read_rollouts([row | changed(IDS, [VOCAB])], policy)  # what is said of a dropped token does not count
