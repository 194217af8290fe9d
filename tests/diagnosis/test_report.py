"""The HTML page without a browser: what it is given, what it holds, and what it refuses."""

import base64
import json
import re
from html import unescape

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from support.refusals import refused

from gradscope.diagnosis.page.page import Definition, Figure, Finding, Page, Paragraph, Section, Table
from gradscope.diagnosis.page.quantities import Quantity
from gradscope.diagnosis.page.render import render
from gradscope.diagnosis.page.viewer import Viewer, prompt_texts, viewer_data
from gradscope.diagnosis.terms import add_weighted_norms
from gradscope.rollouts import TokenBatch

HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>{{ 7777 * 7 }}\u2028&amp;"


def token_table(lengths=(3, 5, 4)) -> pd.DataFrame:
    """A table of made-up tokens: the measured columns of float32, position 1 of response 1 missing."""
    rng = np.random.default_rng(0)
    count = sum(lengths)
    columns = {
        "response": np.repeat(np.arange(len(lengths)), lengths),
        "position": np.concatenate([np.arange(length) for length in lengths]),
        "token": [f"t{number % 4}" for number in range(count)],
        "prob": rng.uniform(size=count),
        "param_grad_norm": np.exp(rng.normal(size=count)),
        "advantage": np.repeat(rng.normal(size=len(lengths)), lengths),
        "weight": rng.normal(size=count),
    }
    table = pd.DataFrame(columns).astype(
        {name: np.float32 for name, c in columns.items() if np.asarray(c).dtype == float}
    )
    return table[~((table["response"] == 1) & (table["position"] == 1))].reset_index(drop=True)


def decoded(data: dict, response: int, column: str) -> np.ndarray:
    number = [quantity["column"] for quantity in data["quantities"]].index(column)
    return np.frombuffer(base64.b64decode(data["responses"][response]["values"][number]), "<f4")


def drawing(title="norms") -> plt.Figure:
    figure, ax = plt.subplots(figsize=(3, 2))
    ax.plot([0, 1], [1, 2])
    ax.set_title(title)
    plt.close(figure)
    return figure


# ---- the viewer's data ----


def test_the_viewers_numbers_are_the_tables_bit_for_bit():
    table = token_table()
    data = json.loads(viewer_data(Viewer(table)).json)
    for response, part in table.groupby("response"):
        for column in ("prob", "param_grad_norm", "advantage"):
            assert (decoded(data, response, column) == part[column].to_numpy()).all()
        assert [data["tokens"][number] for number in data["responses"][response]["tokens"]] == part["token"].tolist()


def test_a_share_of_the_squares_is_of_all_measured_tokens():
    table = token_table()
    table.loc[[0, 5], "param_grad_norm"] = np.nan
    data = json.loads(viewer_data(Viewer(add_weighted_norms(table))).json)
    squares = [
        (w * g) ** 2 for w, g in zip(table["weight"].astype(float), table["param_grad_norm"].astype(float), strict=True)
    ]
    total = sum(square for square in squares if square == square)
    found = np.concatenate([decoded(data, response, "squared_share") for response in range(3)])
    np.testing.assert_allclose(found, [100 * square / total for square in squares], rtol=1e-6)  # float32


def test_as_many_responses_are_shown_as_the_budget_allows_and_at_least_one():
    table = token_table((40,) * 20)
    whole = viewer_data(Viewer(table))
    half = viewer_data(Viewer(table, budget=len(whole.json) // 2))
    assert (whole.shown, whole.responses) == (20, 20)
    assert 7 <= half.shown <= 10 and half.responses == 20  # what is the same for all responses counts once
    assert half.tokens == (table["response"] < half.shown).sum()
    assert len(json.loads(half.json)["responses"]) == half.shown
    assert viewer_data(Viewer(table, budget=0)).shown == 1


def test_responses_that_are_linked_are_shown_however_few_fit():
    table = token_table((40,) * 20)
    found = viewer_data(Viewer(table, needed=[17, 3, 17], budget=0))
    assert [own["response"] for own in json.loads(found.json)["responses"]] == [3, 17]
    assert (found.shown, found.tokens) == (2, 80)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "All 3 responses, 11 tokens."),
        ({"budget": 0}, "1 of 3 responses, 3 tokens; more would make this page too large."),
    ],
)
def test_the_page_says_how_many_responses_it_shows_of_how_many(settings, words):
    assert words in render(Page("t", viewer=Viewer(token_table(), **settings)))


def test_the_data_hold_no_markup_and_come_back_as_they_were():
    hostile = [HOSTILE, "\x00", "\u202e", "\ud800", "<!--", "]]>"]
    table = token_table((len(hostile),) * 3)
    table = table[table["response"] == 0].assign(token=pd.Series(hostile, dtype=object))
    found = viewer_data(Viewer(table, prompts=[HOSTILE] * 3)).json
    assert not set("<>&\u2028\u2029") & set(found) and found.isascii()
    data = json.loads(found)
    assert set(hostile) <= set(data["tokens"]) and data["prompts"] == [HOSTILE]


@pytest.mark.parametrize(
    ("scale", "values", "ends"),
    [
        ("linear", [1.0, 2.0, 4.0], (0, 4)),
        ("linear", [-3.0, -1.0], (-3, 0)),
        ("linear", [0.0, 0.0], (0, 1)),
        ("diverging", [-1.0, 0.5, 3.0], (-3, 3)),
        ("diverging", [0.0, 0.0], (-1, 1)),
        ("log", [0.0, 0.5, 8.0], (0.5, 8)),
        ("log", [1e-9, 10.0], (1e-3, 10)),
        ("log", [2.0, 2.0], (1, 2)),
    ],
)
def test_a_scale_spans_its_values_a_linear_one_0_too_and_a_logarithmic_one_four_decades_at_most(scale, values, ends):
    table = token_table((len(values),)).assign(x=values)
    data = json.loads(viewer_data(Viewer(table, quantities=(Quantity("x", "x", scale),))).json)
    found = data["quantities"][0]
    # One in 500 may lie beyond: with so few values that moves an end of the linear scale by at most 0.4 %.
    assert (found["low"], found["high"]) == pytest.approx(ends, rel=5e-3, abs=5e-3)


@pytest.mark.parametrize(
    "viewer",
    [
        lambda table: Viewer(table.drop(columns="token")),
        lambda table: Viewer(table[:0]),
        lambda table: Viewer(table[["response", "position", "token"]]),
        lambda table: Viewer(table, prompts=["a", "b"]),
        lambda table: Viewer(table, rewards=[1.0]),
    ],
)
def test_a_viewer_that_cannot_be_shown_is_refused(viewer):
    with refused():
        viewer_data(viewer(token_table()))


def test_prompt_texts_are_what_precedes_the_response():
    class Letters:
        def decode(self, ids):
            return "".join("-abcdef"[number] for number in ids)

    batch = TokenBatch(
        input_ids=torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]),
        attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool(),
        response_mask=torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 0, 0]]).bool(),
        response_start=torch.tensor([3, 2]),
        group_ids=torch.tensor([0, 0]),
        temperature=torch.ones(2),
    )
    assert prompt_texts(batch, Letters()) == ["ab", "ab"]


# ---- drawings ----


def test_two_drawings_on_a_page_share_no_id_and_all_their_references_lead_somewhere():
    html = render(Page("t", sections=(Section("s", "s", (Figure(drawing(), "one"), Figure(drawing(), "two"))),)))
    for text in re.findall(r"<svg.*?</svg>", html, re.S):
        inner = set(re.findall(r'\bid="([^"]+)"', text))
        referred = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
        assert referred and referred <= inner
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


# ---- the page ----


def full_page() -> Page:
    """Every kind of block, with markup in every text."""
    frame = pd.DataFrame(
        {HOSTILE: [HOSTILE, "b"], "share": [0.1234, np.nan], "count": [1234, -5], "held": [True, False]}
    )
    blocks = (
        Paragraph(HOSTILE),
        Definition(HOSTILE, HOSTILE),
        Figure(drawing(), HOSTILE, "figures/a b.csv"),
        Table(frame, HOSTILE, {"share": "{:.1%}"}),
    )
    return Page(
        title=HOSTILE,
        subtitle=HOSTILE,
        findings=tuple(Finding(HOSTILE, HOSTILE, tone) for tone in ("plain", "good", "warn", "bad")),
        sections=(Section("one", HOSTILE, blocks),),
        viewer=Viewer(token_table().assign(token=HOSTILE), prompts=[HOSTILE] * 3, budget=0),
        facts={HOSTILE: HOSTILE},
        notes=(HOSTILE,),
    )


def test_text_from_anywhere_stays_text():
    html = render(full_page())
    assert len(re.findall(r"<script\b", html)) == 2  # the viewer's data, and the page's own
    assert "<img" not in html and str(7777 * 7) not in html
    assert unescape(html).count(HOSTILE) >= 20


def test_the_page_names_no_address_on_the_network():
    html = render(full_page())
    assert not re.findall(r"https?:|//[a-z]+\.|@import|url\((?!#)", re.sub(r"^\s*//.*$", "", html, flags=re.M))
