"""The page of what is reproduced: its numbers are the CSVs', and every figure and table of the paper has its row."""

import re
from pathlib import Path

import pandas as pd
import pytest
from support.refusals import refused

from analyses.paper_repro import Numbers, render

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def numbers(tmp_path):
    rows = [
        {"variant": "lopti", "baseline": "grpo", "level": "all", "seeds": 6, "difference": 0.0312, "lower": -0.0121}
        | {"upper": 0.0742, "p_holm": 0.2134, "differs": False},
        {"variant": "both", "baseline": "grpo", "level": "all", "seeds": 3, "difference": -0.05, "lower": -0.06}
        | {"upper": -0.04, "p_holm": 0.0004, "differs": True},
        {"variant": "both", "baseline": "grpo", "level": "2", "seeds": 1, "difference": 0.2, "lower": None}
        | {"upper": None, "p_holm": None, "differs": False},
        {"variant": "both", "baseline": "grpo", "level": "3", "seeds": 3, "difference": 0.05, "lower": 0.04}
        | {"upper": 0.06, "p_holm": 0.5, "differs": False},
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "made.csv", index=False)
    return Numbers(tmp_path)


def test_a_verdict_claims_no_more_than_the_corrected_test(numbers):
    assert numbers.verdict("made", "lopti", "grpo", level="all") == "no difference shown"
    assert numbers.verdict("made", "both", "grpo", level="all") == "lower"
    assert numbers.verdict("made", "both", "grpo", level="2") == "one seed decides nothing"


@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("made", {"variant": "both"}),
        ("made", {"variant": "none"}),
        ("made", {"method": "both"}),
        ("lost", {}),
    ],
)
def test_a_number_that_has_not_exactly_one_place_is_an_error(numbers, file, where):
    with refused():
        numbers.number(file, "difference", **where)


def test_the_page_holds_the_numbers_that_the_csvs_hold():
    assert (REPOSITORY / "paper_repro.md").read_text(encoding="utf-8") == render(REPOSITORY / "figures"), (
        "paper_repro.md is not what its text and the CSVs make; run: python -m analyses.paper_repro"
    )


def test_every_figure_and_table_of_the_paper_has_a_row():
    page = (REPOSITORY / "paper_repro.md").read_text(encoding="utf-8")
    named = set()
    for kind, numbers in re.findall(r"^\| (Fig\.|Tables?) ([0-9][^|]*)\|", page, flags=re.MULTILINE):
        for first, last in re.findall(r"(\d+)(?:[–-](\d+))?", numbers):
            named |= {(kind[0], number) for number in range(int(first), int(last or first) + 1)}
    assert named >= {("F", number) for number in range(1, 13)} | {("T", number) for number in range(1, 8)}
