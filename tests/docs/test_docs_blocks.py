"""Every example of the documentation runs, on a tiny policy; what cannot run here is counted."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fenced import Block, make_workshop, read_blocks, run_python, run_shell, seed_everything
from support import cli

from gradscope.cli import commands

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs").rglob("*.md"))
PAGES = ["README.md", *PAGES]
DEAR = {
    "README.md",
    "docs/api.md",
    "docs/beyond-grpo.md",
    "docs/comparing.md",
    "docs/concepts.md",
    "docs/cost.md",
    "docs/formats/trl.md",
    "docs/index.md",
    "docs/methods.md",
    "docs/report.md",
    "docs/start.md",
    "docs/theory.md",
    "docs/tutorials/lora.md",
    "docs/tutorials/trl.md",
    "docs/tutorials/verl.md",
}
"""Pages whose examples `make test-all` runs; those of the others run with every test."""
LANGUAGES = {"python", "sh", "json", "text"}
LEFT_OUT = {
    "README.md": 2,
    "docs/audit.md": 3,
    "docs/checkpoints.md": 3,
    "docs/named-beforehand.md": 2,
    "docs/report.md": 3,
    "docs/reproduction.md": 1,
    "docs/start.md": 1,
    "docs/theory.md": 1,
    "docs/training.md": 2,
    "docs/tutorials/trl.md": 9,
    "docs/tutorials/verl.md": 5,
}
"""How many blocks of a page are not run, or only read; each says why."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    """A folder with all files that the examples name, to be copied."""
    folder = tmp_path_factory.mktemp("docs") / "workshop"
    folder.mkdir()
    make_workshop(folder)
    return folder


def pages() -> list:
    return [pytest.param(page, marks=pytest.mark.all) if page in DEAR else page for page in PAGES]


@pytest.mark.parametrize("page", pages())
def test_the_examples_of_a_page_run_from_top_to_bottom(page, workshop, tmp_path, monkeypatch, undrawn):
    folder = shutil.copytree(workshop, tmp_path / "here")
    monkeypatch.chdir(folder)
    seed_everything()
    space: dict[str, object] = {"__name__": "__main__"}
    for block in read_blocks(REPOSITORY / page):
        if block.language == "python" and block.mode == "run":
            run_python(block, REPOSITORY / page, space)
        elif block.language == "sh" and block.mode != "norun":
            run_shell(block, cli.run, commands._parse, REPOSITORY)


@pytest.mark.parametrize("page", PAGES)
def test_the_command_lines_of_a_page_are_ones_that_gradscope_takes(page):
    """Cheap, for pages whose examples are not run with every test, too."""

    def refuse(*words: str) -> None:
        raise AssertionError(words)

    for block in read_blocks(REPOSITORY / page):
        assert block.language in LANGUAGES, f"line {block.line}: {block.language!r}"
        if block.language == "sh" and block.mode != "norun":
            run_shell(as_read(block), refuse, commands._parse, REPOSITORY)
        elif block.language == "python":
            compile(block.code, page, "exec")


def test_what_is_not_run_is_counted_and_says_why():
    found = {page: [b for b in read_blocks(REPOSITORY / page) if b.mode != "run"] for page in PAGES}
    assert all(block.reason for blocks in found.values() for block in blocks)
    assert {page: len(blocks) for page, blocks in found.items() if blocks or page in LEFT_OUT} == LEFT_OUT


def test_messages_that_troubleshooting_quotes_are_ones_that_gradscope_has():
    source = " ".join(path.read_text() for path in sorted((REPOSITORY / "gradscope").rglob("*.py")))
    source = re.sub(r'["\'] *\n\s*f?["\']', "", source)  # a message that goes on in the next line
    page = (REPOSITORY / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]*)` \|", page, re.M)
    assert len(quoted) > 12
    parts = [part.strip(" ?;") for message in quoted for part in message.split("…")]
    assert [part for part in parts if part and part not in source] == []


def test_pages_name_no_place_of_this_machine():
    for path in [REPOSITORY / "mkdocs.yml", *(REPOSITORY / "docs").rglob("*.*")]:
        if path.suffix in (".md", ".py", ".yml", ".css", ".csv"):
            assert not re.search(r"/(work|root|home)/|localhost|127\.0\.0\.1", path.read_text()), path


@pytest.mark.parametrize("page", [*PAGES, "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "paper_repro.md"])
def test_every_link_of_a_page_leads_somewhere_in_the_repository(page):
    """As the forge shows it, where nothing is built."""
    text = re.sub(r"^( *)```.*?^\1```$", "", (REPOSITORY / page).read_text(), flags=re.M | re.S)
    dead = []
    for target in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        name, _, anchor = target.partition("#")
        path = (REPOSITORY / page).parent / name if name else REPOSITORY / page
        known = headings(path) if anchor and path.suffix == ".md" and path.is_file() else {anchor}
        dead += [] if path.exists() and (anchor in known or anchor.startswith("gradscope")) else [target]
    assert dead == []


def headings(path: Path) -> set[str]:
    """The anchors of a page's headings, as the forge and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def as_read(block: Block) -> Block:
    """The same, not to be run."""
    return replace(block, mode="parse")
