"""The pages of what is reproduced: their numbers are the CSVs', which are those of what is kept."""

import re
import tomllib
from pathlib import Path

import pandas as pd
import pytest
from support.refusals import refused

from analyses import recompute
from analyses.common.places import findings, place
from analyses.common.tables import write_csv
from analyses.paper_repro import FOLDERS, PAGES, QUOTED, Cell, Numbers, quoted_cells, render

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
    write_csv(pd.DataFrame(rows), place(tmp_path, "made.csv"))
    return Numbers(tmp_path)


def test_a_verdict_claims_no_more_than_the_corrected_test(numbers):
    assert numbers.verdict("made", "lopti", "grpo", level="all") == "no difference found"
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


def test_every_picture_has_a_finding_and_every_finding_a_picture_and_a_script():
    pictures = {path.relative_to(REPOSITORY / "figures") for path in (REPOSITORY / "figures").rglob("*.png")}
    told = {Path(folder, f"{name}.png"): one for folder, own in findings().items() for name, one in own.items()}
    assert told.keys() == pictures and findings().keys() == FOLDERS.keys()
    assert all(len(one.says) <= 130 for one in told.values())
    scripts = {one.module for one in told.values()} - {""}
    assert [name for name in scripts if not (REPOSITORY / "analyses" / f"{name.replace('.', '/')}.py").is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_holds_the_numbers_that_the_csvs_hold(page):
    assert (REPOSITORY / page).read_text(encoding="utf-8") == render(REPOSITORY / "figures", page), (
        f"{page} is not what its text and the CSVs make; run: python -m analyses.paper_repro"
    )


@pytest.mark.all
def test_the_csvs_numbers_are_computed_again_from_what_is_kept(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    found = recompute.table(Path("figures"))
    assert found[found["equal"] == "no"].to_dict("records") == []
    assert (found["equal"] == "yes").sum() > 400


def test_a_wrong_number_is_told_from_its_own(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    [cell] = [c for c in quoted_cells(Path("figures")) if c.file == "decision" and c.column == "half_width"]
    found = recompute.recompute(cell, Path("figures"))
    assert recompute.agrees(cell, found)
    wrong = Cell(cell.page, cell.file, cell.column, cell.where, cell.value + 0.001, cell.digits)
    assert not recompute.agrees(wrong, found)


@pytest.mark.all
def test_a_page_by_hand_that_says_another_number_is_told(tmp_path):
    for page in tomllib.loads(QUOTED.read_text(encoding="utf-8")):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((REPOSITORY / page).read_text(encoding="utf-8"), encoding="utf-8")
    assert quoted_cells(REPOSITORY / "figures", tmp_path)
    theory = tmp_path / "docs" / "theory.md"
    theory.write_text(theory.read_text(encoding="utf-8").replace(".80 [.79, .82]", ".81 [.79, .82]"), encoding="utf-8")
    with refused("docs/theory.md"):
        quoted_cells(REPOSITORY / "figures", tmp_path)


def test_the_page_can_be_read_in_two_screens_and_a_table():
    assert len((REPOSITORY / "paper_repro.md").read_text(encoding="utf-8").split()) <= 3000


def test_the_links_of_the_page_lead_to_files():
    page = (REPOSITORY / "paper_repro.md").read_text(encoding="utf-8")
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", page) if "://" not in target}
    assert len(targets) > 50
    assert [target for target in sorted(targets) if not (REPOSITORY / target).is_file()] == []


def test_every_figure_and_table_of_the_paper_has_a_row():
    page = (REPOSITORY / "paper_repro.md").read_text(encoding="utf-8")
    named = set()
    parts = [part for cell in re.findall(r"^\| ([^|]+) \|", page, flags=re.MULTILINE) for part in cell.split("; ")]
    for kind, numbers in re.findall(r"^(Fig\.|Table) ([0-9].*)$", "\n".join(parts), flags=re.MULTILINE):
        for first, last in re.findall(r"(\d+)(?:[–-](\d+))?", numbers):
            named |= {(kind[0], number) for number in range(int(first), int(last or first) + 1)}
    assert named >= {("F", number) for number in range(1, 13)} | {("T", number) for number in range(1, 8)}
