"""A type checker sees what public functions take and give, and agrees with a program that uses them."""

import re
import subprocess
import sys
from inspect import isfunction
from pathlib import Path

import pytest

import gradscope

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.all

PROGRAM = """
from dataclasses import replace
from pathlib import Path
import gradscope
from gradscope.theory import regress_norms
from gradscope.trainer import get_preset
from gradscope.updates import influence, right_direction_shares

policy = gradscope.load_policy("embedded")
batch = gradscope.sample(policy, task="knights-knaves-compact", questions=2, n=2, temperature=0.7, seed=0)
batch = gradscope.read_rollouts("runs/completions", policy, step=501, temperature=0.7)
table = gradscope.measure(policy, batch[:8])
found = gradscope.diagnose("runs/checkpoint-500", Path("rollouts.jsonl"), table, optimizer_state="optimizer.pt", seed=1)
assert found is not None
verdict: str = found.findings["dominance_raw"].verdict
page: Path = found.to_html("report.html")
shares = gradscope.compare(policy, batch, ["lopti"]).by_interval
last: Path = gradscope.train(replace(get_preset("kk-embedded"), steps=5), "runs/grpo")
moved = gradscope.movement_table(gradscope.apply_updates(policy, batch, ["all"]))
right_direction_shares(moved, name="all", seed=0)
regress_norms(table, seed=0)
influence(policy, batch)
with gradscope.capture_gradients(policy, ["model.layers.0"]) as grads:
    norm = grads["model.layers.0"].norm()
gradscope.viewer(table).to_html("viewer.html")
"""


def check(tmp_path, program: str) -> tuple[int, str]:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(program)
    flags = ["--python-version", "3.11", "--follow-imports", "silent", "--disable-error-code", "import-untyped"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, tmp_path / "program.py"], cwd=REPOSITORY, capture_output=True, text=True
    )
    return done.returncode, done.stdout


def test_a_program_is_accepted_and_its_mistakes_are_named(tmp_path):
    status, said = check(tmp_path, PROGRAM)
    assert status == 0, said
    status, said = check(tmp_path, PROGRAM.replace("batch[:8]", "3").replace("n=2", "n='2'"))
    assert status == 1 and len(re.findall("error:", said)) == 2, said


def test_no_public_function_is_unknown_to_the_checker(tmp_path):
    names = [name for name in gradscope.__all__ if isfunction(getattr(gradscope, name))]
    _, said = check(tmp_path, "import gradscope\n" + "\n".join(f"reveal_type(gradscope.{name})" for name in names))
    assert len(re.findall("Revealed type is .def ", said)) == len(names), said
