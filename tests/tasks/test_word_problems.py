"""Word problems: their answers by another reading of their words, their wording, and how responses are graded."""

import re

import pytest

from gradscope.tasks import Grade, Question, get_task, grade_response

LESS = {"loses", "sells", "gives", "breaks", "drops", "throws"}
MORE = {"buys", "finds", "gets", "adds", "wins", "is"}


def solve(text: str) -> int:
    """Read a problem word by word: a number does what the last verb before it says; boxes times what each holds."""
    text = text.removesuffix(" End with: The answer is N.")
    groups = re.search(r"(\d+) (?:boxes of|bags with|packs of) (\d+)", text)
    if groups:
        text = text.replace(groups[0], str(int(groups[1]) * int(groups[2])))
    total, sign = 0, 1
    for word in re.findall(r"\w+", text):
        if word in LESS | MORE:
            sign = -1 if word in LESS else 1
        if word.isdigit():
            total += sign * int(word)
    return total


@pytest.fixture(scope="module")
def plain():
    return get_task("word-problems-plain")


def test_every_answer_is_what_the_words_say(plain):
    questions = plain.questions(3000, seed=0)
    assert [question.answer for question in questions] == [(str(solve(q.prompt)),) for q in questions]
    assert {question.level for question in questions} == {1, 2, 3}
    assert all(1 <= int(question.answer[0]) <= 99 for question in questions)
    assert {sign in " ".join(q.prompt for q in questions) for sign in LESS | MORE} == {True}


def test_a_level_is_its_number_and_kind_of_steps(plain):
    numbers = {1: 2, 2: 3, 3: 3}
    for level, count in numbers.items():
        for question in plain.questions(100, seed=1, levels=(level,)):
            assert question.level == level and len(re.findall(r"\d+", question.prompt)) == count
            assert (re.search("boxes|bags|packs", question.prompt) is not None) == (level == 3)


def test_the_wording_varies_and_rarely_repeats(plain):
    questions = [question.prompt for question in plain.questions(1000, seed=0)]
    assert len(set(questions)) > 990
    # Names, things and numbers taken out, sentences are left.
    names = r"\b(Mia|Tom|Anna|Ben|Lucy|Sam|Kate|Max|Emma|Jack|Sara|Paul|Jane|Leo|[Ss]he|[Hh]e)\b"
    places = rf"\d+|{names}|(?<=many )\w+|(?<=# )\w+(?=\.)"
    assert len({re.sub(places, "#", prompt) for prompt in questions}) > 300


def test_the_questions_are_those_of_their_seed(plain):
    assert plain.questions(9, seed=4) == plain.questions(9, seed=4) != plain.questions(9, seed=5)
    assert plain.questions(9, seed=4)[:5] == plain.questions(5, seed=4)


def test_the_chat_is_one_message_of_the_plain_text(plain):
    pairs = zip(get_task("word-problems").questions(9, seed=0), plain.questions(9, seed=0), strict=True)
    for chat, text in pairs:
        assert chat.prompt == [{"role": "user", "content": text.prompt}]
        assert (chat.answer, chat.level) == (text.answer, text.level)


@pytest.mark.parametrize(
    ("response", "correct", "format_ok"),
    [
        ("7+5=12. The answer is 12.", True, True),
        ("12 apples are left, so the answer is 12 apples", True, True),
        ("Answer: **12**", True, True),
        ("The answer is 11. No, the answer is 12.", True, True),
        ("The answer is 12. No, the answer is 11.", False, True),
        ("The answer is 012.", True, True),
        ("The answer is -12.", False, True),
        ("The answer is 12.5.", False, False),
        ("The answer is 1,200.", False, False),
        ("The answer is 120.", False, True),
        ("The answer is N.", False, False),
        ("7+5=12", False, False),
        ("The answer is " + "9" * 5000, False, True),
        ("", False, False),
    ],
)
def test_only_the_stated_number_counts(response, correct, format_ok):
    question = Question("7+5", ("12",))
    grade = Grade(float(correct), correct=correct, format_ok=format_ok)
    task = get_task("word-problems")
    assert grade_response(task, response, question) == grade and task.reward(response, question) == grade.reward


def test_after_worked_examples_the_first_line_is_graded_and_form_earns_a_tenth(plain):
    task = get_task("word-problems-examples")
    (question,), (bare,) = task.questions(1, seed=2), plain.questions(1, seed=2)
    *examples, problem = question.prompt.split("\n")
    assert problem == bare.prompt.removesuffix(" End with: The answer is N.")
    assert [solve(line.partition("?")[0]) for line in examples] == [23, 26]
    assert [int(line.rpartition(" ")[2].rstrip(".")) for line in examples] == [23, 26]
    right = f"\nSo the answer is {question.answer[0]}."
    assert task.grade(right, question) == Grade(1.1, correct=True, format_ok=True)
    assert task.grade(f"The answer is 99.{right}", question) == Grade(0.1, correct=False, format_ok=True)
    assert task.grade(f"It depends.{right}", question) == Grade(0.0, correct=False, format_ok=False)
    assert task.reward(right, question) == 1.1
