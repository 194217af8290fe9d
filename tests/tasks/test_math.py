"""Math problems: reading answers and ground truths, grading them, the process that does it; the data's own rows."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.refusals import refused
from support.tiers import every

from gradscope.tasks import Grade, Question, get_task, grade_response, math, math_verifier
from gradscope.tasks.math import agrees, boxed_answer, read_truths, stated_answer

FILES = ("dsr_uniform_train", "math500", "amc", "aime24", "minerva", "olympiad_bench")
SIZES = {"dsr_uniform_train": 10_000, "math500": 500, "amc": 83, "aime24": 30, "minerva": 272, "olympiad_bench": 675}
CHAT = [{"role": "user", "content": r"What is 1 + 1? Output the final answer within \boxed{}."}]


@pytest.fixture
def forgetful():
    """Nothing is taken from what earlier answers were found to be."""
    math_verifier.is_equal.cache_clear()


# --- reading answers


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} but then \boxed{2}", "2"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{ \text{Evelyn} }", r"\text{Evelyn}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # an escaped brace needs no partner
        (r"\boxed{a \\{b}}", r"a \\{b}"),  # a line break, then a brace that counts
        (r"\boxed{\boxed{5}}", "5"),
        ("\\boxed{1,\n2}", "1,\n2"),
        (r"\boxed{5", None),
        (r"\boxed{1} and \boxed{\frac{1}{2}", None),  # only the last counts
        (r"\boxed{1} \boxed{}", None),
        (r"\boxed 5", None),
        (r"boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_box_holds_the_answer(response, answer):
    assert boxed_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is 5", "5"),
        ("answer is 4. No, the final answer is: $x = 0.5$. I hope it is correct.", "$x = 0.5$"),
        ("**Answer:** 5", "5"),
        ("Answer: 3.5.\nThat was it.", "3.5"),
        ("The answer is", None),
        ("I have no idea", None),
    ],
)
def test_the_last_statement_of_an_answer_ends_with_its_sentence(response, answer):
    assert stated_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "grade"),
    [
        (r"Hence $\boxed{\frac{2}{4}}$.", Grade(1.0, correct=True, format_ok=True)),
        (r"\boxed{0.5}", Grade(1.0, correct=True, format_ok=True)),
        (r"\boxed{0.5} or rather \boxed{2}", Grade(0.0, correct=False, format_ok=True)),
        (r"The answer is 0.5. \boxed{0.", Grade(0.0, correct=False, format_ok=False)),
        ("The answer is 1/2.", Grade(1.0, correct=True, format_ok=False)),
        ("The answer is 2.", Grade(0.0, correct=False, format_ok=False)),
        ("0.5", Grade(0.0, correct=False, format_ok=False)),  # a number on its own is not said to be the answer
        ("", Grade(0.0, correct=False, format_ok=False)),
    ],
)
@pytest.mark.parametrize("name", ["math", "math-plain"])
def test_a_grade_is_one_for_a_right_answer_and_good_form_is_a_box(name, response, grade):
    question = Question(CHAT, (r"\frac{1}{2}",))
    assert grade_response(get_task(name), response, question) == grade
    assert get_task(name).reward(response, question) == grade.reward


# --- comparing


@pytest.mark.parametrize(
    ("truth", "same", "other"),
    [
        ("142", "142.0", "143"),
        ("025", "25", "52"),
        ("1000", "1{,}000", "100"),
        (r"\frac{1}{2}", r"\dfrac12", r"\frac{1}{3}"),
        ("$2^{1009}$", r"2 \cdot 2^{1008}", "2^{1008}"),
        ("$69$,$84$", r"\{84, 69\}", "69, 85"),
        ("p - q", "-(q-p)", "q-p"),
        ("x=5", "5", "x=6"),
        ("5", r"5 \text{ cm}", r"4 \text{ cm}"),
        ("[0,1)", "[0, 1)", "[0, 1]"),
        ("(2,8)", r"\left(2, 8\right)", "(8,2)"),
        (r"\text{Evelyn}", "Evelyn", r"\text{Evelin}"),
        # Numbers as computers write them, and small ones, of which a fixed number of decimals leaves nothing.
        ("4.5e33\n", r"4.5 \times 10^{33}", r"4.5 \times 10^{32}"),
        ("3.3e12", "3300000000000", "330000000000"),
        ("1e-5", "0.00001", "0.00002"),
        (r"5.3 \times 10^{-27}", r"53 \times 10^{-28}", r"6 \times 10^{-20}"),
        ("0.00000589", "5.89e-6", "5.9e-6"),
        # What is no mathematics is compared as text.
        ("$t(0,4]$", "t(0,4]", "t(0,5]"),
        ("E_1,  E_2", "E_1, E_2", "E_1, E_3"),
    ],
)
def test_equal_answers_agree_and_others_do_not(truth, same, other):
    assert agrees(same, (truth,))
    assert not agrees(other, (truth,))
    assert agrees(same, (other, truth))  # any of several is enough


@pytest.mark.parametrize(
    "answer",
    ["", " ", "$", "}{", "\\", "\x00", "\ud800", "\\frac", "1e999999999999", "7" * 5000, "\\text{" * 50, "True\n", "²"],
)
def test_an_answer_that_cannot_be_read_is_wrong(answer):
    assert not agrees(answer, ("5",))
    assert agrees("5.0", ("5",))  # and the next one is read


@pytest.mark.all
@pytest.mark.parametrize(
    "answer", every(3, ["10^{10^{10}}", r"\binom{100000000}{50000000}", "(" * 2000 + "1" + ")" * 2000])
)
def test_an_answer_that_takes_too_long_is_wrong_and_the_next_one_is_read(answer, forgetful, monkeypatch):
    monkeypatch.setattr(math_verifier, "SECONDS", 0.3)
    start = time.process_time()
    assert not agrees(answer, ("7",))
    assert time.process_time() - start < 0.3  # it was not calculated here
    monkeypatch.undo()
    assert agrees("7.0", ("7",))


@pytest.mark.all
def test_a_process_that_was_killed_is_started_again(forgetful):
    assert agrees("2/4", ("1/2",))
    math_verifier._verifier._process.kill()
    math_verifier._verifier._process.wait()
    assert agrees("3/6", ("1/2",))


@pytest.mark.all
def test_an_interrupted_question_does_not_leave_its_reply_to_the_next(forgetful):
    assert agrees("2/4", ("1/2",))

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            agrees("10^{10^{10}}", ("7",))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert agrees("3/6", ("1/2",))


@pytest.mark.all
def test_grading_is_silent_and_leaves_nothing_running():
    code = (
        "import logging, sys\n"
        "from gradscope.tasks.math import agrees\nfrom gradscope.tasks.math_verifier import _verifier\n"
        "print(agrees('2/4', ('1/2',)), agrees('\\\\frac', ('1/2',)), logging.root.handlers, logging.root.level,"
        "'sympy' in sys.modules, _verifier._process.pid)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    *found, pid = done.stdout.split()
    assert (found, done.stderr) == (["True", "False", "[]", "30", "False"], "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


# --- files


@pytest.mark.parametrize(
    ("given", "truths"),
    [
        ("96", ("96",)),
        ("9.6\n", ("9.6",)),
        (142.0, ("142",)),
        (0.5, ("0.5",)),
        (1e-05, ("1e-05",)),
        (3, ("3",)),
        (np.float32(2), ("2",)),
        (["0.01\n", "0.02"], ("0.01", "0.02")),
        (np.array(["0.01", "0.02"], dtype=object), ("0.01", "0.02")),
        (np.array([1.0, 2.5]), ("1", "2.5")),
        ('["1/2", "0.5"]', ("1/2", "0.5")),
        ("[12,28]", ("[12,28]",)),  # an interval, not a list
        ('["1", ', ('["1",',)),
    ],
)
def test_a_ground_truth_is_one_text_or_several(given, truths):
    assert read_truths("row 0", given) == truths


@pytest.mark.parametrize(
    "given",
    [
        None,
        float("nan"),
        float("inf"),
        "",
        "  ",
        [],
        ["1", ""],
        ["1", None],
        [["1"]],
        {"a": 1},
        True,
        b"1",
        '["1", 2, null]',
    ],
)
def test_a_ground_truth_that_is_none_is_refused(given):
    with refused("row 7"):
        read_truths("row 7", given)


def test_rows_are_read_in_verls_layout(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    file = write_rows(tmp_path / "a.parquet", [row(CHAT, "2"), row([system, *CHAT], "3")])
    texts = write_rows(tmp_path / "b.parquet", [row("1 + 3 =", "4")])
    questions = get_task("math").questions(None, seed=0, files=(file, texts))
    expected = [Question(CHAT, ("2",)), Question([system, *CHAT], ("3",)), Question("1 + 3 =", ("4",))]
    assert sorted(questions, key=lambda q: q.answer) == expected
    plain = get_task("math-plain").questions(None, seed=0, files=(tmp_path / "*.parquet",))
    content = CHAT[0]["content"]
    assert [q.prompt for q in sorted(plain, key=lambda q: q.answer)] == [content, f"Be brief.\n\n{content}", "1 + 3 ="]


def test_questions_are_drawn_by_seed_and_not_twice(tmp_path):
    file = write_rows(tmp_path / "a.parquet", [row(CHAT, str(i)) for i in range(50)])
    task = get_task("math")
    drawn = task.questions(20, seed=3, files=(file,))
    assert drawn == task.questions(20, seed=3, files=(file,)) != task.questions(20, seed=4, files=(file,))
    assert len({question.answer for question in drawn}) == 20
    assert len({question.answer for question in task.questions(None, seed=3, files=(file,))}) == 50
    with refused("51", "a.parquet", "50"):
        task.questions(51, seed=0, files=(file,))


@pytest.mark.parametrize("prompt", [5, None, " ", [], ["1?"], [{"role": "user"}], [{"role": "user", "content": None}]])
def test_a_prompt_that_is_none_is_named_by_its_row(tmp_path, prompt):
    with refused("row 0"):
        get_task("math").questions(None, seed=0, files=(write_rows(tmp_path / "a.parquet", [row(prompt, "2")]),))


@pytest.mark.parametrize("truths", [("2", None), (2.0, float("nan")), (["2"], [])])
def test_a_truth_that_is_none_is_named_by_its_row(tmp_path, truths):
    file = write_rows(tmp_path / "a.parquet", [row("1?", truth) for truth in truths])
    with refused("row 1"):
        get_task("math").questions(None, seed=0, files=(file,))


def test_rows_of_another_layout_are_refused_by_their_column(tmp_path):
    for other in ({"question": "1"}, {"prompt": CHAT, "reward_model": "2"}, {"prompt": CHAT, "reward_model": {"a": 1}}):
        with refused("reward_model"):
            get_task("math").questions(None, seed=0, files=(write_rows(tmp_path / "a.parquet", [other]),))


def row(prompt, truth):
    return {"data_source": "made_up", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}}


def write_rows(path, rows, like=None):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows) if like is None else pa.Table.from_pylist(like).slice(0, 0)
    pq.write_table(table, path)
    return path


# --- the data


@pytest.mark.parametrize("name", every(3, FILES))
def test_every_row_of_the_data_is_a_problem_with_the_papers_prompt(data_folder, name):
    questions = get_task("math").questions(None, seed=0, files=(f"math/{name}.parquet",))
    plain = get_task("math-plain").questions(None, seed=0, files=(f"math/{name}.parquet",))
    assert len(questions) == SIZES[name]
    ending = r" Let's think step by step and output the final answer within \boxed{}."
    for chat, text in zip(questions, plain, strict=True):
        (message,) = chat.prompt
        assert message == {"role": "user", "content": text.prompt}
        assert text.prompt.endswith(ending)
        assert chat.answer == text.answer


@pytest.mark.parametrize("name", every(3, FILES))
def test_a_boxed_ground_truth_is_right_and_verified_and_another_rows_is_wrong(data_folder, name):
    # All 11,639 truths pass (some minutes); here 12 to 15 rows of each file.
    task = get_task("math")
    questions = task.questions(None, seed=0, files=(f"math/{name}.parquet",))
    for question in questions[:: max(1, len(questions) // 12)]:
        for truth in question.answer:
            assert task.grade(rf"Thus $\boxed{{{truth}}}$.", question) == Grade(1.0, correct=True, format_ok=True)
            assert math_verifier.is_equal(math._normalise(truth), (math._normalise(truth),))  # not only equal as a text
            assert task.reward(rf"\boxed{{{truth} + 1}}", question) == 0.0
