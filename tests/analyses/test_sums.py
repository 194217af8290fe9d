"""The math problems of scale cpu: right answers, honest steps, and a test that training never sees."""

import random
import re

import pytest

from analyses.common.sums import STEPS, TEST, TRAIN, draw_terms, is_of_test, write_question, write_steps
from gradscope.tasks import Grade, Question, draw_questions, get_task, grade_response


def by_eye(prompt: str) -> tuple[int, int]:
    """Number of steps and the result, read off the question as text."""
    first, *rest = re.findall(r"[+-]?\d+", prompt.removesuffix(":"))
    total = int(first)
    for term in rest:
        total = total + int(term[1:]) if term[0] == "+" else total - int(term[1:])
    return len(rest), total


@pytest.mark.parametrize("task", [TRAIN, TEST], ids=["train", "test"])
def test_every_question_has_its_right_answer_and_as_many_steps_as_its_level(task):
    questions = draw_questions(task, 200, seed=3)
    assert [question.level for question in questions] == list(STEPS) * 40
    assert len({question.prompt for question in questions}) == 200
    for question in questions:
        assert (question.level, question.answer) == by_eye(question.prompt)
    assert questions[:7] == draw_questions(task, 7, seed=3) != draw_questions(task, 7, seed=4)


def test_training_and_test_have_no_question_in_common():
    train, test = ({question.prompt for question in draw_questions(task, 2000, seed=0)} for task in (TRAIN, TEST))
    assert train.isdisjoint(test)
    assert not any(map(is_of_test, train))
    rng = random.Random(1)
    dealt = [is_of_test(write_question(draw_terms(rng.choice(STEPS), rng))) for _ in range(4000)]
    assert sum(dealt) / 4000 == pytest.approx(0.2, abs=0.03)  # four and a half standard errors


def test_steps_without_slips_are_true_equations_that_end_in_the_answer():
    rng = random.Random(5)
    for steps in STEPS * 20:
        terms = draw_terms(steps, rng)
        response = write_steps(terms, rng=rng)
        chain, answer = response.split(" =")
        for left, right in zip(chain.split("="), chain.split("=")[1:], strict=False):
            assert by_eye(left)[1] == int(re.match(r"\d+", right)[0])
        assert int(answer) == sum(terms)


def test_a_slip_is_an_error_of_one_step_and_the_next_goes_on_from_it():
    rng, slips, steps = random.Random(2), 0, 0
    for _ in range(600):
        chain, answer = write_steps(draw_terms(4, rng), rng=rng, noise=0.25).split(" =")
        results = [int(re.match(r"\d+", part)[0]) for part in chain.split("=")]
        for (left, _), right in zip(zip(chain.split("="), results, strict=True), results[1:], strict=False):
            error = right - by_eye(left)[1]
            assert abs(error) in (0, 1, 10)
            slips, steps = slips + (error != 0), steps + 1
        assert int(answer) == results[-1]
    assert slips / steps == pytest.approx(0.25, abs=0.04)  # 2,400 steps: four and a half standard errors


QUESTION = Question("47+5-8+6:", 50, level=3)


@pytest.mark.parametrize(
    ("response", "correct", "format_ok"),
    [
        ("47+5=52-8=44+6=50 =50", True, True),
        ("=50", True, True),
        (" =050", True, True),
        ("nonsense =50", True, True),  # the steps earn nothing
        ("47+5=52-8=44+6=50 =51", False, True),
        ("47+5=52-8=44+6=50", False, False),  # no answer: the last result is one of the steps
        ("47+5=52-8=44+6=50 =", False, False),
        ("47+5=52-8=44+6=50 =50 ", False, False),
        ("=50 =49", False, True),  # the last one counts
        ("=50+0", False, False),
        ("=-50", False, False),
        ("=٥٠", False, False),
        ("=" + "9" * 5000, False, False),
        ("", False, False),
    ],
)
def test_only_a_right_number_at_the_end_is_right(response, correct, format_ok):
    grade = Grade(float(correct), correct=correct, format_ok=format_ok)
    for task in (TRAIN, TEST):
        assert grade_response(get_task(task.name), response, QUESTION) == grade
        assert task.reward(response, QUESTION) == grade.reward
