"""Pages that are made of the code as mkdocs builds them, so that they cannot go stale.

A page holds a marker, `<!-- gradscope:NAME argument -->`, which the maker of that name fills; what follows it up to
`<!-- end -->` is for readers of the source, and says where the same stands. Links are those of the repository: figures,
the examples of reports and paper_repro.md come from there, not from copies in docs/.
"""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
import os
import posixpath
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MARKER = re.compile(r"<!-- gradscope:(\w+) ?([\w.]*) -->(?:(?:(?!<!-- gradscope).)*?<!-- end -->)?", re.S)
ATTRIBUTES = re.compile(r"^(```\w+) \{[^}\n]*\}$", re.M)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?!https?:|#)[^)#\s]+)(#[^)\s]*)?\)")
PAGES = {"paper.md": "paper_repro.md"}
"""Pages that stand at the top of the repository."""
DOORS = ("objective", "theory", "updates", "trainer", "plots", "sampling", "tasks")
"""Rooms whose doors have a page each, beside the package's own names."""
OWN = {
    "load": ("load_policy", "Policy", "checkpoint_step", "read_adamw_state", "whole_weights"),
    "read": ("read_rollouts", "read_dump", "TokenBatch", "sample"),
    "measure": (
        *("measure", "gradients.MeasureSettings", "TokenJacobian", "Resources", "interval_gradients"),
        *("capture_gradients", "capture_activations"),
    ),
    "diagnose": (
        *("diagnose", "diagnosis.DiagnosisSettings", "diagnosis.Diagnosis", "diagnosis.Finding", "diagnosis.Verdict"),
        *("viewer", "make_report", "write_report"),
    ),
    "compare": (
        *("compare", "ComparisonSettings", "apply_updates", "apply_update", "movement_table", "StepSettings"),
        "updates.movement.Movement",
    ),
    "train": ("train",),
    "errors": ("InputError", "SelfCheckError"),
}
"""The package's own names, and what they return, in the order of a day's work."""
IN_TRL = (
    *("GradScopeCallback", "SpikeRecorder", "TokenMonitor", "RolloutWriter", "ReweightLoptiMixin", "TRLSettings"),
    "trl_settings",
    *("batch_from_trl", "response_denominators"),
)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Figures and their CSVs, the examples of reports, and pages of the repository."""
    figures = ROOT / "figures"
    for path in sorted(figures.rglob("*")):
        if not path.is_file() or path.suffix not in (".png", ".csv", ".html", ".json"):
            continue
        name = path.relative_to(figures).as_posix()
        place = f"figures/{name}".removeprefix("figures/reports/")
        files.append(File.generated(config, place, abs_src_path=str(path)))
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill the markers; drop what only the tests read; lead the repository's links to the site's places."""
    known, here = {file.src_uri for file in files}, page.file.src_uri
    markdown = LINK.sub(lambda found: _link(found, here, known), markdown)
    markdown = ATTRIBUTES.sub(r"\1", markdown)
    return MARKER.sub(lambda found: MAKERS[found[1]](*filter(None, [found[2]])), markdown)


def _link(found: re.Match[str], here: str, known: set[str]) -> str:
    """A link in the page `here`, to where the site has it; the words alone, if it has not what the repository has."""
    page = PAGES.get(here, f"docs/{here}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), found[3]))
    place = {source: name for name, source in PAGES.items()}.get(path, path)
    place = place.removeprefix("figures/reports/").removeprefix("docs/").replace(".ipynb", ".md")
    if place not in known:
        return found[2] if (ROOT / path).exists() else found[0]
    return f"{found[1]}[{found[2]}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{found[4] or ''})"


def make_methods() -> str:
    """Every weighting of the registry: all in a table, then each with its parameters."""
    from gradscope.objective import COMPARED, SOURCES, WEIGHTINGS

    def link(trainer: str) -> str:
        version, place = SOURCES[trainer]
        return f"[{trainer} {version}]({place})"

    head = ["name", "what stands before ∇ log π", "defaults", "whose, and how it is written", "checked against"]
    parts = [f"| {' | '.join(head)} |\n{'|---' * len(head)}|"]
    for name, kind in WEIGHTINGS.items():
        formula = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
        defaults = ", ".join(f"{parameter.name} {_shown(parameter.default)}" for parameter in fields(kind))
        whose = "<br>".join(f"{link(trainer)}: `{written}`" for trainer, written in kind.TRAINERS.items())
        own = ", ".join(f"{trainer} {SOURCES[trainer][0]}" for trainer in kind.OWN_LOSSES)
        shown = f"[`{name}`](#{name})" + (" •" if name in COMPARED else "")
        parts[0] += f"\n| {shown} | {_methods_text(formula)} | {defaults or '–'} | {whose or 'paper'} | "
        parts[0] += f"own loss of {own} |" if own else "the printed formula |"
    for name, kind in WEIGHTINGS.items():
        rows = ["| parameter | default | values |", "|---|---|---|"]
        for parameter in fields(kind):
            low, high = parameter.metadata.get("range", (-inf, inf))
            span = f"{low:g} to {high:g}" if high < inf else "any number" if low == -inf else f"{low:g} or more"
            span = ", ".join(parameter.metadata.get("words", (span,)))
            rows.append(f"| `{parameter.name}` | {_shown(parameter.default)} | {span} |")
        text = _methods_text(inspect.getdoc(kind) or "")
        parts.append(f"### `{name}`\n\n{text}\n\n" + ("\n".join(rows) if len(rows) > 2 else "No parameters."))
    return "\n\n".join(parts)


def _shown(default: float | str) -> str:
    return default if isinstance(default, str) else f"{default:g}"


def _methods_text(text: str) -> str:
    """A docstring in Markdown, its papers as links."""
    return re.sub(
        r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text.replace("*", r"\*").replace("|", r"\|")
    )


def make_glossary() -> str:
    """The definitions that a page quotes."""
    from gradscope.diagnosis import PARTS

    terms = {name: text for part in PARTS.values() for name, text in getattr(part, "DEFINITIONS", {}).items()}
    rows = [f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in terms.items()]
    return "\n".join(["| term | meaning |", "|---|---|", *rows])


def make_statistics() -> str:
    """Every headline statistic: what it is, and its unit in the kept reports."""
    from gradscope.diagnosis import PARTS
    from gradscope.diagnosis.parts import gather
    from gradscope.plots.labels import label_of

    words, units = gather(PARTS.values(), "LABELS"), {}
    for path in sorted((ROOT / "figures").glob("reports/**/statistics.csv")):
        with path.open(encoding="utf-8") as file:
            units |= {row["statistic"]: row["unit"] for row in csv.DictReader(file)}
    names = sorted(words.keys() | units.keys())
    rows = [[f"`{name}`", words.get(name, label_of(name)).replace("|", "\\|"), units.get(name, "")] for name in names]
    return _table(["statistic", "what it is", "unit"], rows)


def make_format(name: str) -> str:
    """The columns of a format, and what the reader says of every log of that kind."""
    from gradscope.rollouts import READERS

    form = READERS[name]
    rows = [[f"`{c.place}`", f"`{c.name}`", "yes" if c.required else ""] for c in form.columns if c.name in NATIVE]
    said = "\n".join(f"- {note[0].upper()}{note[1:]}." for note in form.notes)
    sets = [form.needs] if form.needs else form.beside
    told = "; or ".join(", ".join(f"`{column}`" for column in sorted(own)) for own in sets)
    read = f"\n\nRead are:\n\n{_table(['column', 'native column', 'always there'], rows)}" if rows else ""
    return f"Detected by the columns {told}.{read}\n\ngradscope says of every log of this kind:\n\n{said}"


NATIVE = (
    *("prompt", "response", "prompt_ids", "response_ids", "ids", "mask", "response_mask", "weight", "step", "group"),
    *("reward", "advantage", "old_logprobs", "ref_logprobs", "sampler_logprobs", "logprobs", "entropy", "clipped"),
    *("temperature", "chat_template_kwargs"),
)
"""Columns whose place in a log is shown: `ids` and `mask` are one sequence, `weight` is a token's in the loss."""


def readers() -> dict[str, dict[str, str]]:
    """What is asked of every format, and its answers."""
    return tomllib.loads((ROOT / "docs/formats/readers.toml").read_text(encoding="utf-8"))


def make_readers() -> str:
    """What is asked of every format, a row each."""
    from gradscope.rollouts import READERS
    from gradscope.rollouts.formats.base import FOUND_BY_TEXT, RETOKENISED

    rows = []
    for name, told in readers().items():
        form = READERS[name]
        alone = "; a response alone keeps its raw reward" if form.keeps_single_rewards else ""
        counts = told["step"] != "none"
        step = f"{told['step']}; checkpoint n sampled n + {form.first_step}" if counts else told["step"]
        is_text = bool({RETOKENISED, FOUND_BY_TEXT} & {*form.notes})
        begins = "what the tokenizer puts before text, once" if is_text else "as logged"
        more = [told[what] for what in ("sampled", "logprobs")]
        rows.append(
            [f"[{name}]({name}.md)", told["group"] + alone, step.replace("n + 0", "n"), *more, begins, told["left_out"]]
        )
    names = ["format", "a group", "the step", "sampled tokens", "log π", "BOS", "left out beside the common rule"]
    return _table(names, rows)


def make_checked() -> str:
    """Against what each reader was held."""
    return _table(["format", "versions, how, when"], [[name, told["checked"]] for name, told in readers().items()])


def _table(names: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows)]
    return "\n".join(lines)


def make_architectures() -> str:
    """The tables that analyses/docs/architectures.py has measured: what is exact, what is refused and left out."""
    with (ROOT / "figures/cost/data/architectures.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    exact = [row for row in rows if row["outcome"] == "exact"]
    kinds = {row["model_type"] for row in exact}
    lines = [f"Exact are {len(kinds)} of {len({row['model_type'] for row in rows})} model types:", ""]
    lines += ["| model type | class | variant | path | error, T = 1 | error, T = 0.7 |", "|---|---|---|---|---|---|"]
    cells = "| {model_type} | {class} | {variant} | {path} | {worst_error_t1} | {worst_error_t0.7} |"
    lines += [_fill(cells, row) for row in exact]
    lines += ["", "Not measured:", "", "| model type | outcome | reason |", "|---|---|---|"]
    lines += [_fill("| {model_type} | {outcome} | {reason} |", row) for row in rows if row["outcome"] != "exact"]
    versions = Counter(row["transformers"] for row in rows)
    for version in versions.keys() - {versions.most_common(1)[0][0]}:
        kinds = sorted({row["model_type"] for row in rows if row["transformers"] == version})
        lines += ["", f"With transformers {version}: {', '.join(kinds)}."]
    how = {f"{row['date']}, torch {row['torch']}, transformers {row['transformers']}" for row in rows}
    return "\n".join(lines) + f"\n\nMeasured on {'; '.join(sorted(how))}."


def make_conformance() -> str:
    """The table that analyses/docs/conformance has measured, a trainer after the other."""
    with (ROOT / "figures/verdicts/data/conformance.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = []
    for trainer in dict.fromkeys(row["trainer"] for row in rows):
        own = [row for row in rows if row["trainer"] == trainer]
        versions = ", ".join(sorted({row["version"] for row in own}))
        lines += [f"### {trainer} {versions}", ""]
        lines += ["| case | documented | agrees | reading | factor | distance |", "|---|---|---|---|---|---|"]
        cells = "| {case} | {documented} | {agrees} | {shown} | {factor} | {distance} |"
        for row in own:
            shown = ", ".join(filter(None, [row["reading"], row["fault"]]))
            agrees = "**no**" if row["agrees"] == "no" else row["agrees"]
            lines.append(_fill(cells, row | {"shown": shown, "agrees": agrees}))
        lines.append("")
    how = {f"{row['date']}, torch {row['torch']}" for row in rows}
    return "\n".join(lines) + f"\nMeasured on {'; '.join(sorted(how))}."


def _fill(cells: str, row: dict[str, str]) -> str:
    """A row of a table; the names of its columns are no names of Python."""
    return re.sub(r"\{([\w.]+)\}", lambda found: row[found[1]].replace("|", "\\|"), cells)


def make_cli() -> str:
    """`--help` of every command, without its boxes."""
    from gradscope.cli.commands import COMMANDS

    overview = f"```text\n{help_of()}\n```"
    return overview + "".join(f"\n\n## {name}\n\n```text\n{help_of(name)}\n```" for name in COMMANDS)


def help_of(*command: str) -> str:
    """What `gradscope COMMAND --help` prints, in plain lines."""
    from gradscope.cli.commands import main

    before, printed = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "88"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*command, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    text, lines = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()), []
    for line in text.splitlines():
        if found := re.match(r"╭─ (.*?) ─*╮", line):
            lines += ["", found[1]]
        elif not line.startswith("╰") and not re.fullmatch(r" *[-─]{20,} *", line):
            lines.append(line.removeprefix("│").removesuffix("│").removeprefix(" ").rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def make_api(group: str) -> str:
    """mkdocstrings' directives of a group of the package's own names."""
    listed = {name for names in OWN.values() for name in names}
    assert {name for name in listed if "." not in name} == own_names().keys(), "OWN in docs/hooks.py lists them"
    return "\n\n".join(_own(name) for name in OWN[group])


def _own(name: str) -> str:
    door, _, short = name.rpartition(".")
    return directive(f"gradscope.{door}".rstrip("."), short)


def make_trl() -> str:
    """Those of what works inside TRL."""
    return "\n\n".join(directive("gradscope.integrations.trl", name) for name in IN_TRL)


def make_door(door: str) -> str:
    """Those of a room's door; what the package shows too is described there."""
    module, own = import_module(f"gradscope.{door}"), own_names()
    names = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
    parts = [(module.__doc__ or "").strip()]
    for name in sorted(names, key=str.lower):
        if own.get(name) is getattr(module, name):
            parts.append(f"### {name}\n\nSee [`gradscope.{name}`](../api.md#gradscope.{name}).")
        else:
            parts.append(directive(f"gradscope.{door}", name))
    return "\n\n".join(filter(None, parts))


def own_names() -> dict[str, Any]:
    """What `import gradscope` shows, rooms aside."""
    import gradscope

    shown = {name: getattr(gradscope, name) for name in gradscope.__all__}
    return {name: value for name, value in shown.items() if not isinstance(value, ModuleType)}


def directive(door: str, name: str) -> str:
    """The name as its door shows it; a constant, whose place only its door knows, by name alone."""
    value = getattr(import_module(door), name)
    anchor = f'<a id="{door}.{name}"></a>\n\n'
    if not (inspect.isclass(value) or inspect.isfunction(value)) or not value.__module__.startswith("gradscope."):
        return "" if name.isupper() else f"{anchor}### {name}\n\n`{door}.{name}`"
    place = f"{value.__module__}.{value.__qualname__}"
    return f'{anchor}::: {place}\n    options:\n      heading: "{name}"\n      toc_label: "{name}"\n'


def make_verl() -> str:
    """verl has an environment of its own: its module's text is read, not run."""
    path = ROOT / "gradscope/integrations/verl/__init__.py"
    text = inspect.cleandoc(path.read_text(encoding="utf-8").split('"""')[1].replace("\\\\\n", "\\\n"))
    blocks = [
        f"```text\n{inspect.cleandoc(block)}\n```" if block.startswith("    ") else re.sub(r":\n- ", ":\n\n- ", block)
        for block in text.split("\n\n")
    ]
    return "\n\n".join(blocks)


MAKERS: dict[str, Callable[..., str]] = {
    "methods": make_methods,
    "glossary": make_glossary,
    "format": make_format,
    "readers": make_readers,
    "checked": make_checked,
    "architectures": make_architectures,
    "conformance": make_conformance,
    "cli": make_cli,
    "api": make_api,
    "statistics": make_statistics,
    "trl": make_trl,
    "verl": make_verl,
    "door": make_door,
}
"""Name of a marker → what fills it."""


def on_post_page(output: str, **_: Any) -> str:
    """A page without the blanks that generated tables leave at line ends."""
    return re.sub(r"[ \t]+\n", "\n", output)
