"""The register of tasks, and tasks that a user adds."""

import subprocess
import sys

import pytest

from gradscope.errors import InputError
from gradscope.tasks import Question, Task, get_task, register, task_names

USER_FILE = """
from gradscope.tasks import Question, register

class Parity:
    name = "parity"

    def questions(self, n, *, seed, **options):
        return [Question(f"Is {seed + i} even?", (seed + i) % 2 == 0) for i in range(n)]

    def reward(self, response, question):
        return float(("yes" in response) == question.answer)

register(Parity())
"""


@pytest.fixture
def registered(monkeypatch):
    """What a test registers is forgotten after it."""
    from gradscope.tasks import registry

    monkeypatch.setattr(registry, "_tasks", dict(registry._tasks))
    monkeypatch.setattr(registry, "_files_read", set())


def test_both_knights_and_knaves_tasks_are_known_by_name():
    assert {"knights-knaves", "knights-knaves-compact"} <= set(task_names())
    for name in ("knights-knaves", "knights-knaves-compact"):
        assert isinstance(get_task(name), Task)
        assert get_task(name).name == name


def test_a_user_adds_a_task_in_a_file_of_their_own(tmp_path, registered):
    file = tmp_path / "my_tasks.py"
    file.write_text(USER_FILE, encoding="utf-8")
    task = get_task(f"{file}:parity")
    (question,) = task.questions(1, seed=4)
    assert question == Question("Is 4 even?", True)
    assert (task.reward("yes", question), task.reward("no", question)) == (1.0, 0.0)
    assert get_task("parity") is task
    assert get_task(f"{file}:parity") is task  # not run a second time


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"no task is called 'chess'; known: .*knights-knaves, knights-knaves-compact"):
        get_task("chess")


def test_a_task_file_that_is_missing_or_lacks_the_name_is_refused(tmp_path, registered):
    with pytest.raises(InputError, match=r"nowhere\.py does not exist"):
        get_task(f"{tmp_path / 'nowhere.py'}:parity")
    file = tmp_path / "my_tasks.py"
    file.write_text(USER_FILE, encoding="utf-8")
    with pytest.raises(InputError, match=r"no task is called 'oddity'; known: .*parity"):
        get_task(f"{file}:oddity")


def test_a_task_file_may_use_dataclasses_that_look_up_their_module(tmp_path, registered):
    file = tmp_path / "with_dataclass.py"
    header = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Level:\n    a: int\n"
    )
    file.write_text(header + USER_FILE, encoding="utf-8")
    assert get_task(f"{file}:parity").name == "parity"


def test_what_is_no_task_is_not_registered(registered):
    with pytest.raises(InputError, match="is not a task; it needs name, questions"):
        register("knights-knaves")


def test_tasks_load_neither_torch_nor_pandas_nor_transformers():
    code = "import sys, gradscope.tasks; print([m for m in ('torch', 'pandas', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
