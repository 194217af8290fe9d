"""`import gradscope` is instant, and every name it promises is there on first use."""

import subprocess
import sys

import pytest

import gradscope

HEAVY = ("torch", "pandas", "transformers", "matplotlib", "seaborn", "scipy", "numpy")

# What other programs call by its dotted name, after `import gradscope` and nothing else.
DOTTED = (
    "theory.logit_grad_norm",
    "theory.logit_grad_bounds",
    "objective.grpo_advantages",
    "objective.reinforce_pp_advantages",
    "objective.reweight",
    "objective.lopti_split",
    "objective.policy_loss",
    "objective.token_weights",
    "tasks.knights_knaves.solve",
    "tasks.knights_knaves.reward",
)


def run_python(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_gradscope_loads_nothing_heavy():
    loaded = run_python(f"import sys, gradscope; dir(gradscope); print(*[n for n in {HEAVY} if n in sys.modules])")
    assert loaded == ""


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_the_command_line_loads_no_room_before_a_command_is_chosen(flag):
    code = f"import sys, gradscope.cli\ntry: gradscope.cli.main(['{flag}'])\nexcept SystemExit: pass\n"
    code += "print(*{n.split('.')[1] for n in sys.modules if n.startswith('gradscope.')} - {'cli', 'errors'})\n"
    said = run_python(code + f"print([n for n in {HEAVY} if n in sys.modules])")
    assert said.splitlines()[-2:] == ["", "[]"]


@pytest.mark.parametrize("name", gradscope.__all__)
def test_every_exported_name_resolves(name):
    assert getattr(gradscope, name) is not None
    assert name in dir(gradscope)


def test_every_dotted_name_resolves_after_a_plain_import():
    assert run_python(f"import gradscope\nfor name in {DOTTED}: assert callable(eval('gradscope.' + name)), name") == ""
