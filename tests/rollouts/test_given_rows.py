"""Rows in memory are read as the file that holds them is."""

import pandas as pd
import pytest
import torch
from support.policies import make_policy, make_responses, write_jsonl
from support.refusals import refused

from gradscope import read_rollouts

NAMES = ("prompt_ids", "response_ids", "group", "reward", "old_logprobs")


@pytest.mark.parametrize("kind", [list, tuple, pd.DataFrame])
def test_rows_are_those_of_their_file(tmp_path, kind):
    policy = make_policy("llama")
    rows = [{name: getattr(row, name) for name in NAMES} for row in make_responses(policy)]
    expected = read_rollouts(write_jsonl(tmp_path / "rollouts.jsonl", rows), policy)
    found = read_rollouts(kind(rows), policy)
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(7), getattr(found, name).nan_to_num(7)), name
    assert found.notes == expected.notes


def test_rows_that_are_no_rollouts_are_refused_by_what_they_are():
    with refused("the given rows, row 0", "columns of no known format"):
        read_rollouts([{"x": 1}], make_policy("llama"))
