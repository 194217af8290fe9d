"""The HTML page in a real Chromium: what a reader sees and does, and that nothing it shows can run or fetch."""

import os
import re
import shutil
from dataclasses import replace
from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from support.policies import make_batch, make_policy

from gradscope.diagnosis import DiagnosisSettings, diagnose, make_report, viewer, write_report
from gradscope.diagnosis.page.page import Definition, Figure, Finding, Page, Section, Table
from gradscope.diagnosis.page.render import write_page
from gradscope.diagnosis.page.viewer import Viewer
from gradscope.rollouts import Note

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

from selenium.webdriver.chrome.service import Service  # noqa: E402  (after importorskip)
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.select import Select  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(
        not (BROWSER and DRIVER),
        reason="needs chromium and chromedriver on the PATH (Debian: chromium, chromium-driver)",
    ),
]

HOSTILE = (
    "<script>window.broken = 1</script>", "<img src=x onerror='window.broken = 1'>", "</script><script>broken=1",
    "{{7777*7}}", "a\x00b", "\u202egnorts\u202c", "x" * 3000, "\ufffd", "&amp;", "", "\n", "ok\n", " ", "\u200b",
)  # fmt: skip
COLUMNS = ("prob", "param_grad_norm", "weighted_norm", "squared_share", "delta_logprob", "advantage", "entropy")
LENGTHS = (len(HOSTILE), 30, 40, 12)


def make_table() -> pd.DataFrame:
    """Four responses: the first of hostile tokens, the second measured in part, the third without position 4."""
    rng, count = np.random.default_rng(0), sum(LENGTHS)
    table = pd.DataFrame(
        {
            "response": np.repeat(range(4), LENGTHS),
            "position": np.concatenate([np.arange(length) for length in LENGTHS]),
            "token": pd.Series([*HOSTILE, *(f"word{number} " for number in range(count - len(HOSTILE)))], dtype=object),
            "prob": rng.uniform(size=count),
            "param_grad_norm": np.exp(3 * rng.normal(size=count)),
            "advantage": np.repeat([0.5, -1.25, 0.75, 0.0], LENGTHS),
            "weight": rng.normal(size=count),
            "delta_logprob": rng.normal(size=count),
            "entropy": rng.uniform(0, 3, size=count),
        }
    )
    table.loc[(table["response"] == 1) & (table["position"] % 3 == 0), "param_grad_norm"] = np.nan
    table = table[(table["response"] != 2) | (table["position"] != 4)].reset_index(drop=True)
    return table.assign(weighted_norm=table["weight"].abs() * table["param_grad_norm"]).assign(
        squared_share=lambda t: 100 * t["weighted_norm"] ** 2 / (t["weighted_norm"] ** 2).sum()
    )


TABLE = make_table()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    figure, ax = plt.subplots(figsize=(6, 2))
    ax.bar([0, 1], [1, 2])
    ax.set(xlabel="<img src=x onerror='window.broken = 1'>", title="a figure")
    ax.imshow(np.eye(4), extent=(0, 1, 0, 1), cmap="viridis")
    plt.close(figure)
    frame = pd.DataFrame(
        {"interval": ["[0, ¼)", HOSTILE[1]], **{f"column {number}": [0.5, 1.5] for number in range(12)}}
    )
    blocks = (Definition("a term", HOSTILE[0]), Figure(figure, HOSTILE[1], "numbers.csv"), Table(frame, HOSTILE[2]))
    findings = tuple(Finding(f"A {tone} finding.", HOSTILE[1], tone) for tone in ("good", "warn", "bad"))
    rewards = {"rewards": [1.0, -1.0, 3.0, 0.0], "reward_parts": {"form": [0.2, np.nan, 0.5, 0.0]}}
    viewer = Viewer(TABLE, prompts=["prompt <b>one</b>", "two", "three", "four"], **rewards)
    whole = Page(
        "A page",
        "of a test",
        findings,
        (Section("first", "First", blocks),),
        viewer,
        {"key": HOSTILE[0]},
        (HOSTILE[1],),
    )
    return write_page(tmp_path_factory.mktemp("page") / "page.html", whole)


@pytest.fixture(scope="module")
def chromium():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium refuses its sandbox to root
    for flag in flags:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(chromium, page):
    """The page, freshly loaded, in light mode on a wide screen."""
    emulate(chromium)
    chromium.get(page.as_uri())
    return chromium


def emulate(driver, *, dark=False, media="", width=1280):
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    features = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def select(driver, name, label):
    Select(driver.find_element(By.ID, name)).select_by_visible_text(label)


def tokens(driver):
    return driver.find_elements(By.CSS_SELECTOR, "#responses .token")


def told(driver) -> dict[str, float | str]:
    """The numbers of a token, by column; words where there is no number. Empty if they are hidden."""
    cells = driver.execute_script(
        "const numbers = document.getElementById('token-numbers');"
        "return numbers.hidden ? [] : [...numbers.querySelectorAll('td')].map((c) => [c.dataset.column, c.textContent])"
    )
    return {column: number_in(text) for column, text in cells}


RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def number_in(text):
    try:
        mantissa, _, power = text.split(" ")[0].replace("−", "-").partition("·10")
        return float(f"{mantissa}e{power.translate(RAISED)}" if power else mantissa)
    except ValueError:
        return text


def expected(response, place) -> dict[str, float]:
    row = TABLE[TABLE["response"] == response].iloc[place]
    return {column: float(np.float32(row[column])) for column in COLUMNS}


def current(driver) -> int:
    return int(driver.find_element(By.CSS_SELECTOR, "#responses article[aria-current]").get_attribute("data-response"))


def luminance(rgb):
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (value / 255 for value in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def inks(driver, selector):
    """(text, its colour, the nearest opaque colour behind it) of every element that shows text of its own."""
    return driver.execute_script(
        """
        const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
        return [...document.querySelectorAll(arguments[0])].filter((element) =>
          element.checkVisibility() && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
        ).map((element) => {
          let behind = element;
          while (behind && (rgb(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
          const back = behind ? rgb(getComputedStyle(behind).backgroundColor) : [255, 255, 255];
          return [element.textContent, rgb(getComputedStyle(element).color), back];
        });""",
        selector,
    )


def test_hostile_tokens_are_text_and_the_page_opens_without_errors_and_fetches_nothing(opened):
    shown = [span.get_attribute("textContent") for span in tokens(opened)]
    named = {"a\x00b": "a␀b", "\u202egnorts\u202c": "⟨RLO⟩gnorts⟨PDF⟩", "\u200b": "⟨ZWSP⟩"}
    assert shown == [named.get(text, text) for text in HOSTILE]
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")  # 3,000 letters wrap
    for span in tokens(opened):
        opened.execute_script("arguments[0].focus()", span)
    opened.execute_script("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert opened.get_log("browser") == [] and opened.execute_script("return window.broken") is None
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_pointing_at_a_token_tells_its_exact_numbers(opened):
    for place in (0, 3, 12):
        ActionChains(opened).scroll_to_element(tokens(opened)[place]).move_to_element(tokens(opened)[place]).perform()
        # Seven digits are shown of a float32.
        assert told(opened) == pytest.approx(expected(0, place), rel=1e-6)
    ActionChains(opened).move_to_element(opened.find_element(By.CSS_SELECTOR, "#tokens h2")).perform()
    assert told(opened) == pytest.approx(expected(0, 12), rel=1e-6)  # until they are put away
    opened.find_element(By.CSS_SELECTOR, "#token-numbers button").click()
    assert told(opened) == {}


def test_the_arrow_keys_move_from_token_to_token_and_tell_the_same_numbers(opened):
    opened.execute_script("document.querySelectorAll('#list button')[3].click()")
    opened.execute_script("document.querySelector('#responses .token[tabindex=\"0\"]').focus()")
    for key, place in [
        (Keys.ARROW_RIGHT, 1),
        (Keys.ARROW_RIGHT, 2),
        (Keys.ARROW_LEFT, 1),
        (Keys.END, 11),
        (Keys.HOME, 0),
    ]:
        opened.switch_to.active_element.send_keys(key)
        focused = opened.switch_to.active_element
        assert focused.get_attribute("data-index") == str(place)
        assert focused.get_attribute("aria-describedby") == "token-numbers"
        assert told(opened) == pytest.approx(expected(3, place), rel=1e-6)
        assert len(opened.find_elements(By.CSS_SELECTOR, "#responses [tabindex='0'][role=option]")) == 1
    opened.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert told(opened) == {}


def test_another_quantity_shades_by_its_own_values(opened):
    opened.execute_script("document.querySelectorAll('#list button')[2].click()")
    for label, column, key in (("entropy", "entropy", "7"), ("gradient norm ‖g‖", "param_grad_norm", "2")):
        select(opened, "quantity", label)
        chosen = [luminance(rgb) for rgb in backgrounds(opened)]
        values = TABLE.loc[TABLE["response"] == 2, column].to_numpy()
        order = np.argsort(values)
        assert (np.diff(np.array(chosen)[order]) <= 1e-9).all() and chosen[order[0]] > chosen[order[-1]] + 0.3
        select(opened, "quantity", "advantage")
        assert len(set(map(tuple, backgrounds(opened)))) == 1  # one advantage in a response
        opened.execute_script("document.querySelector('#responses .token').focus()")
        opened.switch_to.active_element.send_keys(key)
        assert [luminance(rgb) for rgb in backgrounds(opened)] == chosen
        assert Select(opened.find_element(By.ID, "quantity")).first_selected_option.text == label


def backgrounds(driver):
    return driver.execute_script(
        "return [...document.querySelectorAll('#responses .token')].map((span) => "
        "getComputedStyle(span).backgroundColor.match(/[\\d.]+/g).map(Number))"
    )


def test_improbable_tokens_are_shaded_and_certain_ones_hardly(opened):
    opened.execute_script("document.querySelectorAll('#list button')[2].click()")
    select(opened, "quantity", "probability π")
    shades = np.array([luminance(rgb) for rgb in backgrounds(opened)])
    order = TABLE.loc[TABLE["response"] == 2, "prob"].to_numpy().argsort()
    assert (np.diff(shades[order]) >= -1e-9).all() and shades[order[-1]] > shades[order[0]] + 0.3


def test_tokens_that_were_not_measured_are_hatched_and_say_so(opened):
    opened.execute_script("document.querySelectorAll('#list button')[1].click()")
    select(opened, "quantity", "gradient norm ‖g‖")
    hatched = [int(s.get_attribute("data-index")) for s in opened.find_elements(By.CSS_SELECTOR, "#responses .unknown")]
    assert hatched == list(range(0, 30, 3))
    opened.execute_script("arguments[0].focus()", tokens(opened)[3])
    assert told(opened)["param_grad_norm"] == "not measured"
    assert "not measured" in opened.find_element(By.ID, "legend").text


def test_shares_of_the_gradient_are_shaded_by_rank_and_the_largest_are_marked(chromium, tmp_path):
    rng = np.random.default_rng(0)
    shares = rng.standard_t(2, len(TABLE))
    table = TABLE.assign(gradient_share=shares / shares.sum(), own_share=shares / (2 * shares.sum()))
    emulate(chromium)
    chromium.get(viewer(table).to_html(tmp_path / "viewer.html").as_uri())
    chromium.execute_script("document.querySelectorAll('#list button')[1].click()")
    assert "share of the gradient" in Select(chromium.find_element(By.ID, "quantity")).first_selected_option.text
    own = table[table["response"] == 1]["gradient_share"].to_numpy()
    limit = np.quantile(table["gradient_share"].abs(), 0.95)
    marked = [int(s.get_attribute("data-index")) for s in chromium.find_elements(By.CSS_SELECTOR, "#responses .marked")]
    clear = abs(abs(own) - limit) > 1e-3 * limit
    assert {*marked} & {*np.flatnonzero(clear)} == {*np.flatnonzero((abs(own) > limit) & clear)}
    shades, size = np.array(backgrounds(chromium)), abs(own)
    small = size < np.quantile(table["gradient_share"].abs(), 0.45)
    assert (np.ptp(shades[small], axis=0) <= 2).all()  # the smaller half is left unshaded
    against, along = shades[own.argmin()], shades[own.argmax()]
    assert against[0] > against[2] and along[2] > along[0]  # orange and blue
    assert "largest 5 %" in chromium.find_element(By.ID, "legend").text


def test_each_part_of_a_reward_is_shown_with_its_response_where_it_is_known(opened):
    script = "return [...document.querySelectorAll('#list .outcome')].map((outcome) => outcome.textContent)"
    outcomes = opened.execute_script(script)
    assert ["form" in text for text in outcomes] == [True, False, True, True] and "form 0.5" in outcomes[2]
    assert "reward 1 · form 0.2" in opened.find_element(By.CSS_SELECTOR, "#responses .summary").text


def test_responses_are_sorted_by_what_is_asked_for(opened):
    by = TABLE.groupby("response")
    wanted = {
        ("reward", "entropy"): [2, 0, 3, 1],
        ("what shades", "entropy"): by["entropy"].mean().sort_values(ascending=False).index.tolist(),
        ("length", "entropy"): by.size().sort_values(ascending=False).index.tolist(),
        ("what shades", "share of the gradient energy"): by["squared_share"].sum().sort_values()[::-1].index.tolist(),
        ("place in the rollouts", "entropy"): [0, 1, 2, 3],
    }
    assert {o.text for o in Select(opened.find_element(By.ID, "order")).options} == {label for label, _ in wanted}
    for (label, quantity), order in wanted.items():
        select(opened, "quantity", quantity)
        select(opened, "order", label)
        assert listed(opened) == order and current(opened) == order[0]
    opened.find_element(By.ID, "reversed").click()
    assert listed(opened) == [3, 2, 1, 0]


def listed(driver):
    texts = driver.execute_script("return [...document.querySelectorAll('#list button')].map((b) => b.firstChild.data)")
    return [int(text.removeprefix("Response ")) for text in texts]


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_has_a_contrast_of_four_and_a_half(opened, dark):
    emulate(opened, dark=dark)
    opened.execute_script("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    seen = 0
    for number in range(1, 8):
        opened.execute_script("document.querySelectorAll('#responses .token')[4].focus()")
        opened.switch_to.active_element.send_keys(str(number))
        for text, ink, behind in inks(
            opened, "body *:not(svg *):not(script):not(button:disabled)" if number == 1 else "#responses .token"
        ):
            assert contrast(ink[:3], behind[:3]) >= 4.5, (text, ink, behind)
            seen += 1
    assert seen > 100
    paper = opened.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (luminance(paper) < 0.05) == dark


def test_on_paper_everything_is_there_on_white_even_in_dark_mode(opened):
    on_screen = backgrounds(opened)
    emulate(opened, dark=True, media="print")
    WebDriverWait(opened, 10).until(lambda driver: len(tokens(driver)) == len(TABLE))
    shown = opened.find_elements(By.CSS_SELECTOR, "#responses article")
    assert [int(article.get_attribute("data-response")) for article in shown] == [0, 1, 2, 3]
    assert opened.execute_script("return [...document.querySelectorAll('details:not(.keys)')].every((d) => d.open)")
    assert not opened.find_element(By.TAG_NAME, "nav").is_displayed()
    assert not opened.find_element(By.CSS_SELECTOR, ".tools").is_displayed()
    for text, ink, behind in inks(opened, "main *:not(svg *)"):
        assert contrast(ink[:3], behind[:3]) >= 4.5, (text, ink, behind)
    assert backgrounds(opened)[: LENGTHS[0]] == on_screen
    assert opened.execute_script("return getComputedStyle(document.querySelector('.drawing svg')).filter") == "none"
    emulate(opened, dark=True)
    WebDriverWait(opened, 10).until(lambda driver: len(tokens(driver)) == LENGTHS[0])
    assert not opened.execute_script("return [...document.querySelectorAll('details')].some((d) => d.open)")


def test_a_narrow_screen_scrolls_in_one_direction_only(opened):
    emulate(opened, width=400)
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    opened.execute_script("document.querySelectorAll('#list button')[2].click()")
    opened.execute_script("arguments[0].focus()", tokens(opened)[-1])
    box = opened.execute_script("return document.getElementById('token-numbers').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0 and box["right"] <= 400 and 500 < box["bottom"] <= 900  # at the bottom of the screen


def test_headings_landmarks_and_names_are_there(opened):
    count = "return document.querySelectorAll(arguments[0]).length"
    assert opened.execute_script(count, "h1") == opened.execute_script(count, "main") == 1
    assert opened.execute_script(
        "return [...document.querySelectorAll('nav a')].every((a) => document.getElementById(a.hash.slice(1)))"
    )
    unnamed = "select:not(label select), section:not([aria-labelledby]), .drawing:not([aria-labelledby])"
    assert opened.execute_script(count, unnamed) == 0
    assert opened.execute_script(
        "return [...document.querySelectorAll('[aria-labelledby]')].every((element) => "
        "document.getElementById(element.getAttribute('aria-labelledby')).textContent.trim())"
    )


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory):
    """The page of a small policy's diagnosis, with every part, and the diagnosis."""
    policy = make_policy("qwen2", tokenizer=True)
    batch = replace(
        make_batch(policy, lengths=(7, 1, 11, 4, 9, 6) * 3, prompt_lengths=(5, 5, 3, 3, 8, 8) * 3),
        notes=(Note("a temperature was assumed", "temperature"),),
    )
    batch = replace(batch, sampler_logprobs=1.01 * batch.old_logprobs)
    found = diagnose(policy, batch, settings=DiagnosisSettings(resamples=100))
    return write_report(tmp_path_factory.mktemp("diagnosed"), make_report(found, policy, batch)), found


def open_diagnosed(driver, diagnosed, **settings):
    emulate(driver, **settings)
    driver.get("about:blank")
    driver.get(diagnosed[0].as_uri())
    # Once, on a busy machine, the page was looked at before it was there.
    loaded = "return location.protocol === 'file:' && document.readyState === 'complete'"
    WebDriverWait(driver, 10).until(lambda driver: driver.execute_script(loaded))


def test_the_first_screen_holds_the_decision_four_numbers_and_the_way_to_the_tokens(chromium, diagnosed):
    open_diagnosed(chromium, diagnosed, width=1300)
    bottom = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
    for part in (".warnings", ".decision", ".tiles", ".next"):
        assert 0 < chromium.execute_script(bottom, part) < 900
    assert chromium.find_element(By.CSS_SELECTOR, ".warnings").text.startswith("A temperature was assumed")
    assert 1 <= len(chromium.find_elements(By.CSS_SELECTOR, ".decision p:not(.next)")) <= 3
    assert len(chromium.find_elements(By.CSS_SELECTOR, ".tile")) == 4
    caveats = chromium.find_element(By.CSS_SELECTOR, "#verdict details.notes")
    count = len(diagnosed[1].notes) - len(diagnosed[1].warnings)
    assert caveats.get_attribute("open") is None and caveats.text == f"{count} caveats"
    assert len(chromium.find_elements(By.CSS_SELECTOR, "#verdict .drawing")) == 1


def test_the_viewer_opens_at_the_response_that_the_headline_rests_on(chromium, diagnosed):
    table = diagnosed[1].table
    shares = table["gradient_share"].groupby(table["response"]).sum().abs()
    open_diagnosed(chromium, diagnosed, width=1300)
    assert current(chromium) == shares.idxmax()
    assert Select(chromium.find_element(By.ID, "quantity")).first_selected_option.text == "share of the gradient"
    assert "reward" in chromium.find_element(By.CSS_SELECTOR, "#list .outcome").get_attribute("textContent")


def test_rows_about_tokens_lead_to_them_in_the_viewer(chromium, diagnosed):
    open_diagnosed(chromium, diagnosed, width=1300)
    links = chromium.find_elements(By.CSS_SELECTOR, "#largest a[href^='#token-']")
    spikes = diagnosed[1].frames["spikes"]
    assert len(links) >= len(spikes)
    for place in (0, len(spikes) - 1):
        chromium.execute_script("arguments[0].click()", links[place])
        row = spikes.iloc[place]
        WebDriverWait(chromium, 5).until(lambda driver, row=row: current(driver) == row["response"])
        told_of = WebDriverWait(chromium, 5).until(lambda driver: told(driver))
        assert told_of["weighted_norm"] == pytest.approx(row["weighted_norm"], rel=1e-5)
    for link in chromium.find_elements(By.CSS_SELECTOR, "a[href^='#token-']"):  # of every table
        _, response, position = link.get_attribute("href").rpartition("#")[2].split("-")
        chromium.execute_script("arguments[0].click()", link)
        WebDriverWait(chromium, 5).until(lambda driver, wanted=int(response): current(driver) == wanted)
        (here,) = chromium.find_elements(By.CSS_SELECTOR, "#responses .here")
        assert f"position {position} of response {response}" in chromium.find_element(By.ID, "token-numbers").text
        assert here.is_displayed() and chromium.switch_to.active_element == here


def test_numbers_stand_beside_the_text_on_a_wide_screen(chromium, diagnosed):
    open_diagnosed(chromium, diagnosed, width=1300)
    chromium.execute_script("document.querySelector('#responses .token').focus()")
    boxes = "return [...arguments].map((one) => document.querySelector(one).getBoundingClientRect().toJSON())"
    words, box = chromium.execute_script(boxes, "#responses .words", "#token-numbers")
    assert box["left"] >= 0 and box["right"] <= words["left"] and box["bottom"] <= 900


def shown(driver) -> list[int]:
    articles = "return [...document.querySelectorAll('#responses article')].map((one) => Number(one.dataset.response))"
    return driver.execute_script(articles)


@pytest.mark.parametrize(("width", "columns"), [(1300, 2), (390, 1)])
def test_the_responses_to_a_prompt_stand_side_by_side_and_one_prompt_can_be_chosen(chromium, diagnosed, width, columns):
    open_diagnosed(chromium, diagnosed, width=width)
    groups = diagnosed[1].table.groupby("response")["group"].first()
    siblings = groups.index[groups == groups[current(chromium)]].tolist()
    assert shown(chromium) == siblings and len(siblings) == 2
    lefts = "return [...document.querySelectorAll('#responses article')].map((one) => one.getBoundingClientRect().left)"
    assert len({*chromium.execute_script(lefts)}) == columns
    assert len(chromium.find_elements(By.CSS_SELECTOR, "#responses .prompt")) == 1
    other = next(group for group in groups.unique() if group != groups[siblings[0]])
    Select(chromium.find_element(By.ID, "prompt")).select_by_value(str(other))
    assert listed(chromium) == shown(chromium) == groups.index[groups == other].tolist()
    chromium.execute_script("document.getElementById('beside').click()")
    assert shown(chromium) == [current(chromium)]
    chromium.execute_script(f"location.hash = '#token-{siblings[1]}-0'")  # a link leads out of the filter
    WebDriverWait(chromium, 5).until(lambda driver: current(driver) == siblings[1])
    assert len(listed(chromium)) == len(groups)


def test_the_window_is_used_at_its_full_width(chromium, diagnosed):
    open_diagnosed(chromium, diagnosed, width=1900)
    box, width = chromium.execute_script(
        "return [document.querySelector('.reading').getBoundingClientRect(), document.documentElement.clientWidth]"
    )
    assert box["left"] <= 32 and box["right"] >= width - 32


def test_text_is_searched_across_tokens_and_responses(opened):
    assert len(tokens(opened)) == LENGTHS[0]
    field = opened.find_element(By.ID, "find")
    whole = TABLE.groupby("response", sort=False)["token"].agg("".join).str.lower()
    for text in ("D1", "rd20 word21 ", "x" * 40, "nowhere"):
        field.clear()
        field.send_keys(text)
        wanted = [(response, at.start()) for response, own in whole.items() for at in re.finditer(text.lower(), own)]
        found = opened.find_element(By.ID, "found").text
        if not wanted:
            assert found == "no match"
            continue
        place, count = map(int, found.split(" of "))
        assert count == len(wanted)
        for _ in range(min(3, count)):
            response, at = wanted[(place - 1) % count]
            assert current(opened) == response
            here = opened.execute_script("return [...document.querySelectorAll('.here')].map((s) => s.dataset.index)")
            own = TABLE[TABLE["response"] == response]["token"].reset_index(drop=True)
            ends = own.str.len().cumsum()
            covered = own.index[(ends > at) & (ends - own.str.len() < at + len(text))]
            assert [*map(int, here)] == covered.tolist()
            field.send_keys(Keys.ENTER)
            place += 1
    field.clear()
    field.send_keys(Keys.ESCAPE)
    assert not opened.find_elements(By.CSS_SELECTOR, "#responses .found")


@pytest.mark.parametrize(("width", "media"), [(1300, ""), (390, ""), (718, "print")])
def test_nothing_is_cut_off(chromium, diagnosed, width, media):
    """On a wide screen and on paper nothing needs scrolling; on a phone drawings and tables do, by keys too."""
    open_diagnosed(chromium, diagnosed, width=width, media=media)
    chromium.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('.scroll, .drawing')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
    if width != 390:
        assert chromium.execute_script(f"return {wide}.map((e) => e.textContent)") == []
    chromium.execute_script("dispatchEvent(new Event('resize'))")
    assert chromium.execute_script(f"return {wide}.every((e) => e.tabIndex === 0)")
    if media == "print":  # the tallest figure fits on a page of A4 with its caption, and nothing is left to click
        drawing = "document.querySelector('.drawing svg')"
        chromium.execute_script(f"{drawing}.setAttribute('viewBox', '0 0 100 900')")
        assert chromium.execute_script(f"return {drawing}.getBoundingClientRect().height") <= 200 / 25.4 * 96 + 1
        assert not any(link.is_displayed() for link in chromium.find_elements(By.CSS_SELECTOR, "a[href$='.csv']"))


@pytest.mark.parametrize(("width", "dark"), [(1300, False), (1300, True), (390, False)])
def test_axe_finds_no_fault(chromium, diagnosed, width, dark):
    axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    open_diagnosed(chromium, diagnosed, width=width, dark=dark)
    chromium.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    chromium.execute_script((files(axe) / "axe.min.js").read_text(encoding="utf-8"))
    chromium.set_script_timeout(120)
    found = chromium.execute_async_script("axe.run(document).then(arguments[0])")
    assert [(fault["id"], fault["nodes"][0]["html"]) for fault in found["violations"]] == []
    assert len(found["passes"]) > 20


def test_no_name_of_the_code_is_left_on_the_page(chromium, diagnosed):
    open_diagnosed(chromium, diagnosed)
    shown = chromium.execute_script(
        "return [...document.querySelectorAll('main :is(th, h2, h3, dt, .statement, .detail, figcaption, text)')]"
        ".map((e) => e.textContent)"
    )
    assert [text for text in shown if re.search(r"[a-z]_[a-z]{2}", text)] == []


def test_at_most_nine_sections_are_open_and_a_link_opens_the_others(chromium, diagnosed):
    open_diagnosed(chromium, diagnosed)
    figures = "[...document.querySelectorAll('main > section > figure')]"
    drawn = chromium.execute_script(f"return {figures}.map((figure) => figure.parentElement.id)")
    folded = chromium.find_elements(By.CSS_SELECTOR, "main > section > details.folded")
    assert 0 < len({*drawn} - {"verdict"}) <= 9 and folded and not any(one.get_property("open") for one in folded)
    chromium.find_element(By.CSS_SELECTOR, "nav a[href='#layers']").click()
    assert [one.get_property("open") for one in folded] == [
        one.find_element(By.XPATH, "..").get_attribute("id") == "layers" for one in folded
    ]
