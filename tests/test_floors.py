"""The floors: a file of gradscope imports lower floors, or its own without a cycle, and nothing above it."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import gradscope

# A module, or a folder with all that is in it → its floor. A new file gets its entry here.
FLOORS = {
    "__init__": 0, "errors": 0, "batch": 0, "intervals": 0, "theory": 0, "processes": 0,
    "run_folder": 0, "folder_lock": 0, "scratch": 0,
    "logprobs": 1, "objective": 1, "models": 1, "cost": 1, "rewind": 1,
    "machine_speed": 1, "cost_train": 1, "architectures": 1,
    "parameters": 0, "policy": 1, "loading": 1, "tokenization": 1, "checkpoint_files": 1, "devices": 1,
    "peft_adapters": 1, "upcasting": 1, "saved_optimizer": 1, "launched": 1,
    "batch_loss": 1, "batch_logprobs": 1, "shared_prompts": 1, "trained_logprobs": 1, "adamw_state": 1,
    "capture": 2, "tasks": 2, "readers": 2,
    "logit_diagnosis": 3,
    "token_columns": 3, "token_sample": 3, "measure_rounds": 3,
    "measure_settings": 3, "token_table": 3, "group_gradients": 3, "sampling": 3, "steps": 3, "weighted_gradients": 3,
    "checked_tokens": 3, "cost_measure": 3, "measure_plan": 3, "prompt_gradients": 3, "sweep": 3, "sketches": 3,
    "norm_estimates": 3, "estimate_plan": 3,
    "bounds": 4, "gains": 4, "jacobians": 4, "evaluation": 4,
    "step_settings": 4, "variants": 4, "updates": 4, "directions": 4, "influence": 4, "drivers": 4,
    "trainer": 5, "integrations": 5,
    "tuning": 5, "tuning_counts": 5, "tuning_screen": 5, "tuning_report": 5,
    "plots": 6, "plot_layers": 6, "plot_style": 6, "plot_updates": 6, "plot_tuning": 6,
    "diagnosis": 6, "diagnosis_rows": 6, "diagnosis_result": 6, "diagnosis_tokens": 6, "diagnosis_gradients": 6,
    "diagnosis_steps": 6, "diagnosis_words": 6, "diagnosis_format": 6, "diagnosis_definitions": 6,
    "diagnosis_step_words": 6, "diagnosis_notes": 6, "plot_diagnosis": 6, "report": 6, "summary": 6, "__main__": 6,
    "sampling_error": 6, "cli": 6, "cli_train": 6, "cli_evaluate": 6, "cli_tune": 6, "cli_shared": 6,
    "cli_sample": 6, "cli_measure": 6, "cli_diagnose": 6, "cli_diagnose_pages": 6,
}  # fmt: skip


def test_every_file_imports_only_what_lies_below_it(repository):
    assert complaints(repository / "gradscope") == []


def test_no_test_imports_another(repository):
    for path in sorted((repository / "tests").rglob("*.py")):
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = [getattr(n, "module", None) or n.names[0].name for n in nodes]
        assert not [name for name in names if name.split(".")[-1].startswith("test_")], path


def test_no_submodule_bears_the_name_of_a_public_function(repository):
    functions = set(gradscope.__all__) - set(gradscope._SUBMODULES)
    assert functions.isdisjoint(path.stem for path in (repository / "gradscope").iterdir())


def test_an_import_from_a_higher_floor_is_named(tmp_path):
    write(tmp_path, {"batch.py": "def f():\n    from gradscope import token_table", "token_table.py": ""})
    assert complaints(tmp_path) == ["batch (floor 0) imports token_table (floor 3)"]


def test_a_cycle_within_a_floor_is_named(tmp_path):
    write(tmp_path, {"capture/a.py": "from gradscope.capture.b import f", "capture/b.py": "from . import a"})
    assert complaints(tmp_path) == ["cycle: capture.a → capture.b → capture.a"]


def test_a_name_taken_from_the_package_counts_as_its_module(tmp_path):
    write(tmp_path, {"models.py": "from gradscope import measure", "token_table.py": ""})
    assert complaints(tmp_path) == ["models (floor 1) imports token_table (floor 3)"]


def test_a_file_without_a_floor_is_named(tmp_path):
    write(tmp_path, {"helpers.py": ""})
    assert complaints(tmp_path) == ["helpers has no floor: give it one in FLOORS"]


def test_importing_the_whole_package_from_inside_is_named(tmp_path):
    write(tmp_path, {"models.py": "import gradscope"})
    assert complaints(tmp_path) == ["models imports the whole package: import the module that is needed"]


def complaints(package: Path) -> list[str]:
    """What is wrong with the imports of the package in this folder, a line each; empty when nothing is."""
    files = {module_name(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
    homeless = [name for name in files if floor(name) is None]
    if homeless:
        return [f"{name} has no floor: give it one in FLOORS" for name in homeless]
    imports = {name: imported(path, name, set(files)) for name, path in files.items()}
    if whole := [name for name, targets in imports.items() if "" in targets]:
        return [f"{name} imports the whole package: import the module that is needed" for name in whole]
    upward = [
        f"{name} (floor {floor(name)}) imports {target} (floor {floor(target)})"
        for name, targets in imports.items()
        for target in sorted(targets)
        if floor(target) > floor(name)
    ]
    return upward or cycles(imports)


def cycles(imports: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        path = error.args[1][::-1]  # graphlib lists the imported module first
        start = path.index(min(path))
        return ["cycle: " + " → ".join([*path[start:-1], *path[:start], path[start]])]
    return []


def imported(path: Path, name: str, known: set[str]) -> set[str]:
    """Modules of the package that this file imports, wherever in the file it does; '' for the package itself."""
    here = ["gradscope", *name.split(".")]
    if path.name != "__init__.py":
        here.pop()
    elif name == "__init__":
        here = ["gradscope"]
    targets = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets |= {resolve(alias.name, None, known) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            targets |= {resolve(source, alias.name, known) for alias in node.names}
    return targets - {None}


def resolve(source: str, taken: str | None, known: set[str]) -> str | None:
    """The module behind `import source` or `from source import taken`; None if it is not of this package."""
    package, _, inner = source.partition(".")
    if package != "gradscope":
        return None
    if taken is None:
        return inner
    inside = f"{inner}.{taken}" if inner else taken
    if inside in known:
        return inside
    return inner or gradscope._DEFINED_IN.get(taken, "__init__")


def module_name(path: Path) -> str:
    """capture/hooks.py → capture.hooks, capture/__init__.py → capture, and __init__.py itself stays __init__."""
    parts = path.with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


def floor(name: str) -> int | None:
    return FLOORS.get(name.partition(".")[0])


def write(package: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
