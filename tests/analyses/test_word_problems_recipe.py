"""The worked answers of the warm start: right, of varied words, and as short as the recipe wants."""

import random
import re

from analyses.recipes.word_problems_policy import WORDINGS, write_answer
from gradscope.tasks import get_task
from gradscope.tasks.word_problems import LEVELS, draw_problem

SIGNS = {"plus": "+", "minus": "-", "times": "*"}


def steps_of(answer: str) -> list[int]:
    """The results of the answer's own steps: its first number, then each sign and number up to what they make."""
    words = re.sub("plus|minus|times", lambda word: SIGNS[word[0]], answer)
    total, results = int(re.search(r"\d+", words)[0]), []
    for sign, number, said in re.findall(r"([-+*]) ?(\d+)(?: is | ?= ?|: )(\d+)", words):
        total = {"+": total + int(number), "-": total - int(number), "*": total * int(number)}[sign]
        results.append(total)
        assert total == int(said)
    return results


def test_worked_answers_are_right_step_by_step_and_say_so_in_many_ways():
    rng, task, forms = random.Random(0), get_task("word-problems"), set()
    for _ in range(300):
        for level in LEVELS:
            problem = draw_problem(level, rng)
            answer = write_answer(problem, rng)
            assert tuple(steps_of(answer)) == problem.results, answer
            assert task.grade(answer, task.question(problem)).correct, answer
            forms.add(re.sub(r"\d+", "#", answer))
    assert len(forms) > 600


def test_varied_answers_are_right_too_and_say_so_in_more_ways():
    rng, task = random.Random(0), get_task("word-problems")
    forms = {name: set() for name in WORDINGS}
    for name, wording in WORDINGS.items():
        for _ in range(300):
            for level in LEVELS:
                problem = draw_problem(level, rng)
                answer = write_answer(problem, rng, wording)
                numbers = [int(number) for number in re.findall(r"\d+", answer.removeprefix("Step 1: "))]
                steps = [
                    number
                    for (_, by), result in zip(problem.steps, problem.results, strict=True)
                    for number in (by, result)
                ]
                assert numbers == [problem.start, *steps, problem.results[-1]], answer
                assert task.grade(answer, task.question(problem)).correct, answer
                forms[name].add(re.sub(r"\d+", "#", answer))
    assert len(forms["varied"]) > 850 > len(forms["plain"])
