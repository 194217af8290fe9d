"""The register of tasks, and tasks that a user adds."""

import subprocess
import sys
from math import nan
from types import SimpleNamespace

import pytest
from support.refusals import refused

from gradscope.errors import InputError
from gradscope.tasks import Grade, Question, Task, data, draw_questions, get_task, grade_response, register, task_names

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
    monkeypatch.setattr("gradscope.runs.user_code._files_read", {})


def test_every_task_that_comes_along_is_known_by_name():
    names = ["arithmetic", "knights-knaves", "knights-knaves-compact", "math", "math-plain"]
    assert set(names) <= set(task_names())
    for name in names:
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
    with refused("chess", "knights-knaves-compact"):
        get_task("chess")


@pytest.mark.parametrize(
    "change",
    [
        {"name": None},
        {"name": ""},
        {"questions": 5},
        {"reward": None},
        {"reward": "r"},
        {"grade": 5},
    ],
)
def test_what_has_a_member_of_another_kind_is_no_task(registered, change):
    with refused():
        register(type("Changed", (Counting,), change)())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import no_such_module", "raised ModuleNotFoundError (No module named 'no_such_module')"),
        ("def f(:", "raised SyntaxError (invalid syntax"),
        ("1 / 0", "raised ZeroDivisionError (division by zero)"),
        ("raise SystemExit(3)", "raised SystemExit (3)"),
        ("raise KeyError('two\\nlines')", "raised KeyError ("),
        ("register(5)", "raised InputError (5 is not a task"),
    ],
)
def test_a_task_file_that_cannot_be_run_is_refused_in_one_line(tmp_path, registered, line, words):
    file, before = tmp_path / "broken.py", set(sys.modules)
    file.write_text(f"from gradscope.tasks import register\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        get_task(f"{file}:parity")
    assert f"the task file {file} {words}" in str(caught.value)
    assert set(sys.modules) <= before
    file.write_text(USER_FILE, encoding="utf-8")
    assert get_task(f"{file}:parity").name == "parity"  # mended, it is run again


@pytest.mark.all
def test_tasks_load_nothing_heavy_before_they_need_it():
    heavy = ("pandas", "pyarrow", "transformers", "math_verify", "sympy")
    code = f"import sys, gradscope.tasks; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- drawing questions


class Counting:
    """A user's task that knows one option of its own."""

    name = "counting"

    def questions(self, n, *, seed, start=0):
        return [Question(f"after {i}?", i + 1) for i in range(start, start + min(n, 3))]

    def reward(self, response, question):
        return float(response == str(question.answer))


@pytest.mark.parametrize(
    ("task", "options", "named"),
    [
        (Counting(), {"files": ("a.parquet",)}, "files"),
        (get_task("math"), {"people": (3,)}, "people"),
        (get_task("arithmetic"), {"people": (3,)}, "people"),
        (get_task("knights-knaves"), {"level": 3}, "level"),
    ],
)
def test_an_option_that_a_task_does_not_take_is_refused(task, options, named):
    with refused(named):
        draw_questions(task, 1, seed=0, **options)


@pytest.mark.parametrize("name", ["arithmetic", "knights-knaves", "math", "word-problems"])
def test_all_questions_of_a_task_that_has_no_files_are_refused(name):
    with refused("a number of questions"):
        draw_questions(get_task(name), None, seed=0)


def _raise(error):
    raise error


def unchecked(made, **fields):
    """A copy with other values, which the tests' own checks of types would not let through."""
    copied = object.__new__(type(made))
    copied.__dict__.update(vars(made) | fields)
    return copied


BAD_QUESTIONS = {
    "raises": lambda n, *, seed: 1 / 0,
    "ends": lambda n, *, seed: _raise(SystemExit(1)),
    "none": lambda n, *, seed: None,
    "number": lambda n, *, seed: 5,
    "text": lambda n, *, seed: "abc",
    "dicts": lambda n, *, seed: [{"prompt": "?"}],
    "no seed": lambda n: [Question("?", 0)],
    "level": lambda n, *, seed: [unchecked(Question("?", 0), level="easy")],
    "half a level": lambda n, *, seed: [unchecked(Question("?", 0), level=1.5)],
    "no function": 5,
}


@pytest.mark.parametrize("what", BAD_QUESTIONS)
def test_questions_that_are_none_are_refused_in_one_line(what):
    task = Counting()
    task.questions = BAD_QUESTIONS[what]
    with refused("task 'counting'"):
        draw_questions(task, 2, seed=0)


RIGHT = Grade(1.0, True)


@pytest.mark.parametrize(
    "grade",
    [
        None,
        1.0,
        *(unchecked(RIGHT, reward=reward) for reward in ("a", "1", None, nan)),
        *(unchecked(RIGHT, correct=correct) for correct in (None, "no")),
        unchecked(RIGHT, format_ok="yes"),
        SystemExit(2),
    ],
)
def test_a_grade_that_is_none_is_refused(grade):
    class Graded(Counting):
        def grade(self, response, question):
            return _raise(grade) if isinstance(grade, SystemExit) else grade

    with refused("task 'counting'"):
        grade_response(Graded(), "yes", Question("?", 0))


# --- files


def test_a_file_is_looked_for_as_it_is_and_then_below_the_data_folder(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for path in (here / "a.parquet", there / "a.parquet", there / "sub" / "b.parquet", there / "sub" / "c.parquet"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("GRADSCOPE_DATA", str(there))

    def found(*patterns):
        return [str(path.resolve().relative_to(tmp_path)) for path in data.find_files(patterns)]

    assert found("a.parquet") == ["here/a.parquet"]
    assert found("sub/b.parquet") == ["there/sub/b.parquet"]
    assert found("sub/*.parquet") == ["there/sub/b.parquet", "there/sub/c.parquet"]
    assert found("sub/c.parquet", "s*/*.parquet", there / "sub" / "b.parquet") == [
        "there/sub/c.parquet",
        "there/sub/b.parquet",
    ]
    everything = [f"there/{name}" for name in ("a.parquet", "sub/b.parquet", "sub/c.parquet")]
    assert found(there / "**" / "*.parquet") == everything
    assert data.find_files("a.parquet") == data.find_files(["a.parquet"])  # one name is a list of one
    (here / "odd[1].parquet").touch()
    assert found("odd[1].parquet") == ["here/odd[1].parquet"]


@pytest.mark.parametrize("pattern", ["none.parquet", "no*.parquet", "folder", ""])
def test_a_pattern_without_a_file_is_refused_with_both_places(tmp_path, monkeypatch, pattern):
    (tmp_path / "here" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("GRADSCOPE_DATA", str(tmp_path / "there"))
    with pytest.raises(InputError) as caught:
        data.find_files([pattern])
    for place in ("here", "there"):
        assert str(tmp_path / place / pattern) in str(caught.value)
    assert f"no file matches {pattern}" in str(caught.value)


def test_a_task_of_a_file_may_be_a_variable_of_it_without_being_registered(tmp_path, registered):
    (tmp_path / "mine.py").write_text(
        "class T:\n"
        "    name = 'the-name-of-mine'\n"
        "    def questions(self, n, *, seed):\n"
        "        return []\n"
        "    def reward(self, response, question):\n"
        "        return 0.0\n"
        "doubles = T()\n"
        "number = 3\n"
    )
    register(SimpleNamespace(name="doubles", questions=lambda n, *, seed: [], reward=lambda response, question: 1.0))
    assert get_task(f"{tmp_path}/mine.py:doubles").name == "the-name-of-mine"  # not the other of that name
    assert get_task(f"{tmp_path}/mine.py:the-name-of-mine") is get_task(f"{tmp_path}/mine.py:doubles")
    with refused():
        get_task(f"{tmp_path}/mine.py:number")
    with refused():
        get_task(f"{tmp_path}/mine.py:halves")
