"""The arithmetic task: sums that a small policy can write, graded as math problems are."""

import re

import pytest

from gradscope.policy import load_policy
from gradscope.sampling import Sample, rollout_rows
from gradscope.tasks import Grade, Question, get_task, grade_response
from gradscope.tasks.arithmetic import arithmetic


@pytest.fixture(scope="module")
def policy():
    return load_policy("embedded")


def test_every_question_has_its_right_answer_and_as_many_digits_as_its_level():
    questions = arithmetic.questions(300, seed=0)
    assert [question.level for question in questions] == [1, 2, 3] * 100
    for question in questions:
        one, sign, other = re.fullmatch(r"(\d+)([+-])(\d+)=", question.prompt).groups()
        assert len(one) == len(other) == question.level
        assert question.answer == (str(int(one) + int(other) if sign == "+" else int(one) - int(other)),)
    assert {question.prompt[question.level] for question in questions} == {"+", "-"}
    assert any(question.answer[0].startswith("-") for question in questions)


def test_the_questions_are_those_of_their_seed():
    assert arithmetic.questions(9, seed=4) == arithmetic.questions(9, seed=4) != arithmetic.questions(9, seed=5)
    assert arithmetic.questions(9, seed=4)[:5] == arithmetic.questions(5, seed=4)


@pytest.mark.parametrize(
    ("response", "grade"),
    [
        ("19", Grade(1.0, correct=True, format_ok=True)),
        (" 19\n", Grade(1.0, correct=True, format_ok=True)),
        ("019", Grade(1.0, correct=True, format_ok=True)),
        ("-19", Grade(0.0, correct=False, format_ok=True)),
        ("18", Grade(0.0, correct=False, format_ok=True)),
        ("9" * 5000, Grade(0.0, correct=False, format_ok=True)),  # Python itself reads 4300 digits at most
        ("12+7", Grade(0.0, correct=False, format_ok=False)),  # equal to 19, but nothing was calculated
        ("19.0", Grade(0.0, correct=False, format_ok=False)),
        ("19 or 18", Grade(0.0, correct=False, format_ok=False)),
        ("١٩", Grade(0.0, correct=False, format_ok=False)),
        ("Zoey is a knight", Grade(0.0, correct=False, format_ok=False)),
        ("", Grade(0.0, correct=False, format_ok=False)),
    ],
)
def test_only_the_right_whole_number_is_right(response, grade):
    question = Question("12+7=", ("19",))
    assert grade_response(get_task("arithmetic"), response, question) == grade
    assert get_task("arithmetic").reward(response, question) == grade.reward


def test_the_embedded_policys_tokenizer_writes_prompts_and_answers(policy):
    for question in arithmetic.questions(60, seed=1):
        for text in (question.prompt, *question.answer):
            ids = policy.encode_response(text)
            assert policy.decode(ids) == text
            assert policy.tokenizer.unk_token_id not in ids


class Scribe:
    """Writes down the answer of the first question to each prompt, and its own prompt."""

    def __init__(self, policy, question):
        self.policy, self.question = policy, question

    def sample(self, prompt_ids, *, n, **settings):
        right = self.policy.encode_response(self.question.answer[0])
        return [[Sample(ids, [0.0] * len(ids), True) for ids in (right, prompt)[:n]] for prompt in prompt_ids]

    def sync(self, weights):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


def test_the_embedded_policys_words_are_graded(policy):
    questions = arithmetic.questions(3, seed=1)
    settings = {"n": 2, "temperature": 1.0, "max_new_tokens": 6, "seed": 0}
    rows = rollout_rows(policy, questions, task=arithmetic, sampler=Scribe(policy, questions[0]), **settings)
    same = [float(question.answer == questions[0].answer) for question in questions]
    assert [row["reward"] for row in rows] == [reward for first in same for reward in (first, 0.0)]
