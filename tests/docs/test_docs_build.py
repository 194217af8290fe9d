"""The documentation builds without a warning and without the network, and what it shows needs none either."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from support.shrunk import MODEL_TYPES
from support.tiers import every

from gradscope.objective import WEIGHTINGS

REPOSITORY = Path(__file__).resolve().parents[2]
needs_mkdocs = pytest.mark.skipif(
    not all(map(find_spec, ("mkdocs", "material", "mkdocstrings"))), reason="pip install mkdocs-material mkdocstrings"
)
ASSET = re.compile(
    r"<(?:script|link|img|source|iframe)\b[^>]*?(?:src|href)\s*=\s*[\"']?((?:https?:)?//[^\"'\s>]+)", re.I
)
IMPORTED = re.compile(r"@import[^;]*//|url\(\s*[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built pages; a proxy that nobody answers at stands before the network."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    environment = os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@needs_mkdocs
@pytest.mark.all
def test_built_pages_load_nothing_from_elsewhere(site):
    pages, styles = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert len(pages) > 30 and styles
    assert {page.name: found for page in pages if (found := ASSET.findall(page.read_text()))} == {}
    assert [style.name for style in styles if IMPORTED.search(style.read_text())] == []


@needs_mkdocs
@pytest.mark.all
def test_generated_pages_hold_what_they_are_made_of(site):
    import gradscope

    assert not [page for page in site.rglob("*.html") if "<!-- gradscope:" in page.read_text()]
    methods, commands, api = ((site / f"{name}.html").read_text() for name in ("methods", "cli", "api"))
    assert all(f'id="{name}"' in methods for name in WEIGHTINGS)
    assert "--tokens-per-interval" in commands and "--reweight-alpha" in commands
    names = [name for name in gradscope.__all__ if callable(getattr(gradscope, name))]
    assert [name for name in names if f'id="gradscope.{name}"' not in api] == []
    assert re.search(r"<li>\s*(<p>)?<code>optimizer_state</code>: ", api)  # parameters of a docstring are a list
    assert "<strong>Args:</strong>" in api and all(f">{name}<" in api for name in ("Finding", "DiagnosisSettings"))


@needs_mkdocs
@pytest.mark.all
def test_the_site_can_be_searched_from_disk_and_holds_what_it_links_to(site):
    assert (site / "search/search_index.js").is_file() and not list(site.rglob("__pycache__"))
    assert "data:image/png" in (site / "notebooks/first_look.html").read_text()
    reports = sorted(site.glob("report-*/**/report.html"))
    assert reports
    for page in reports:
        links = re.findall(r'href="(data/[^"#]+)"', page.read_text())
        assert [link for link in links if not (page.parent / link).is_file()] == []


def architectures() -> list[dict[str, str]]:
    with (REPOSITORY / "figures/cost/data/architectures.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_table_of_architectures_has_every_model_type_of_transformers_and_no_wrong_number():
    from analyses.docs.architectures import VARIANTS, variant

    rows = architectures()
    if transformers.__version__ in {row["transformers"] for row in rows}:  # another version has other models
        assert MODEL_TYPES.keys() <= {row["model_type"] for row in rows}
    assert {variant(name) for name in VARIANTS} <= {row["variant"] for row in rows}
    assert {row["outcome"] for row in rows} == {"exact", "refused", "left out"}
    exact = [row for row in rows if row["outcome"] == "exact"]
    assert all(float(row[f"worst_error_t{t}"]) < 1e-10 for row in exact for t in ("1", "0.7"))
    assert len({row["model_type"] for row in exact}) >= 70
    assert all(row["reason"] for row in rows if row["outcome"] != "exact")


@pytest.mark.parametrize("name", every(2, ["llama", "granite_residual", "reformer", "bart"]))
def test_a_row_of_the_table_of_architectures_is_what_its_script_finds(name):
    from analyses.docs.architectures import one_row

    found = one_row(name)
    stable = ("model_type", "class", "variant")
    kept = next(row for row in architectures() if all(row[key] == found[key] for key in stable))
    assert (found["outcome"], found.get("path", "")) == (kept["outcome"], kept["path"])
