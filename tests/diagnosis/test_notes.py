"""Notes and samples of prompts."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch

from gradscope.diagnosis.notes import tell_pooled
from gradscope.diagnosis.products.predicted_step import within_budget
from gradscope.rollouts import Note, Response, collate


@pytest.mark.parametrize(("used", "words"), [([0, 1], "All 2 "), ([2], ""), ([0, 2], "1 of the 2 ")])
def test_whose_the_responses_in_use_are_is_counted_where_earlier_steps_were_added(used, words):
    """Of prompts 0 and 1 from step 4 and prompt 2 from the checkpoint's own, step 5."""
    responses = [Response([5, n], [7], group=n, step=step, advantage=1.0) for n, step in enumerate((4, 4, 5))]
    batch = replace(collate(responses), notes=(Note("step 4 is added to step 5", "pooled"),)).of_prompts(used)
    table = pd.DataFrame({"response": used, "logprob": -0.1, "old_logprob": [-0.2] * len(used)})
    said = [note for note in tell_pooled(batch, table).notes if note.kind == "pooled"]
    assert len(said) == bool(words) and all(f"step 5. {words}" in note for note in said)


def test_a_budget_of_tokens_takes_whole_prompts_and_at_least_one():
    responses = [Response([5], [6] * size, group=group) for group in range(6) for size in (3, 4)]
    batch = collate(responses)
    for budget, prompts in ((10**30, 6), (1000, 6), (21, 3), (20, 2), (1, 1)):
        rows = within_budget(batch, budget, generator=torch.Generator().manual_seed(0))
        chosen = batch.group_ids[rows]
        assert len(chosen.unique()) == prompts and len(rows) == 2 * prompts
