"""The six categories of Table 5 on responses written for it, counted by hand."""

import pandas as pd
import pytest

from analyses.paper.words import CATEGORIES, Options, count_categories, main

RESPONSE = """Let's analyze Zoey's statement first. Since Zoey says that Noah is a knave, we should check both cases.
If Zoey is a knight, then Noah is a knave. Because Noah's statements contradict this, Zoey must be a knave.
So Noah is a knight. Given that he is, James' statement holds; therefore James is a knight as well.
Checking again: we assumed nothing else, so this is definite."""


def counts(text):
    """Only the categories that occur."""
    return {category: count for category, count in count_categories(text).items() if count}


def test_a_response_counted_by_hand():
    assert count_categories(RESPONSE) == {
        "Analysis": 3,  # analyze, check, Checking
        "Statement": 3,  # Zoey's statement, Noah's statements, James' statement
        "Causal Indicator": 3,  # Since, Because, Given that
        "Conclusion Indicator": 3,  # So, therefore, so
        "Assumption": 2,  # If …, then …; assumed
        "Assertion": 2,  # must be, definite
    }


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_form_counts_once_for_its_category_in_either_case(category):
    for word in CATEGORIES[category]:
        for form in word.forms:
            said = {"XXX's statement": f"Zoey's {form}", "if…then…": "if not, then"}.get(word.name, form)
            for text in (f"x {said} y", f"X {said.upper()} Y", f"({said})."):
                assert word.count(text) == 1, text
                assert count_categories(text)[category] == 1, text


@pytest.mark.parametrize(
    "text",
    [
        "an unassuming knight",
        "also, a sofa; soon, reason, Sofia",
        "sincere, insincerely",
        "definitely, indefinite, definition",
        "the checkmate, a checklist, unchecked",
        "it must have been; musty bees",
        "assumption",
        "the statement; this statement; restatement",
        "considerable, inconsiderate",
        "overdue to",
        "thusly, henceforth",
        "looking up at",
        "if A lies, B does",
        "then if",
        "If A lies, B does. Then C does.",
        "If A lies\nthen B does",
        "stiff and then",
        "analyse, analyst, analyses",
    ],
)
def test_words_that_only_look_alike_do_not_count(text):
    assert counts(text) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SO, so. (So) “so”—so!", {"Conclusion Indicator": 5}),
        ("as a\nresult due  to", {"Causal Indicator": 1, "Conclusion Indicator": 1}),
        ("Zoey’s Statement", {"Statement": 1}),
        ("If we assume that A lies, then B does", {"Assumption": 2}),
        ("if A then B, if C then D", {"Assumption": 2}),
        ("A lies if and only if B does", {}),
    ],
)
def test_case_punctuation_white_space_and_what_lies_within_if_then(text, expected):
    assert counts(text) == expected


def test_the_trace_of_the_embedded_policy_counted_by_hand():
    text = (
        "try Mia+\nMia+: Oliver? is not a knight so Oliver-\n"
        "Oliver-: If Oliver- is a knight then Zoey? is a knight no\n"
        "else Mia- Oliver?\nMia-: Oliver? is not a knight so Oliver+\ncheck\nOliver+: Mia- is a knave ok\n</think>"
        "<answer> Zoey is a knight </answer>"
    )
    assert counts(text) == {"Analysis": 1, "Conclusion Indicator": 2, "Assumption": 1}


def test_table_5_has_the_papers_words_category_by_category(tmp_path, capsys):
    main(Options(out=tmp_path))
    found = pd.read_csv(tmp_path / "table5.csv")
    assert found.groupby("category", sort=False)["word"].agg(list).to_dict() == {
        "Analysis": ["analyze", "consider", "look at", "check", "examine"],
        "Statement": ["XXX's statement"],
        "Causal Indicator": ["since", "because", "due to", "given that"],
        "Conclusion Indicator": ["so", "thus", "hence", "as a result", "consequently", "therefore"],
        "Assumption": ["assume", "if…then…"],
        "Assertion": ["must be", "definite"],
    }
    assert "analyze, analyzes, analyzed, analyzing" in capsys.readouterr().out
