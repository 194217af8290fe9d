"""Math problems from files in verl's layout, graded by math-verify.

A file has a row per problem: `prompt`, a chat or a string, and `reward_model.ground_truth`, a string, a number or a
list of alternative right answers (as a list or JSON-encoded: a list of strings, since "[0,1]" is an interval).
DSR-Uniform, ORZ, MATH-500, AMC, AIME, Minerva and OlympiadBench have this layout.

The paper's prompt for Qwen2.5-7B, a base model, is the problem and then "Let's think step by step and output the final
answer within \\boxed{}.", without any template. The data's `prompt` holds just that as one user message. The task
`math-plain` gives its text alone, as the paper does; `math` gives the chat, which the template of the policy's
tokenizer turns into text, as a policy needs that was trained on chats.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradscope.errors import InputError
from gradscope.tasks.data import draw_rows, read_rows
from gradscope.tasks.math_verifier import is_equal
from gradscope.tasks.registry import Grade, Question

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is matched with its backslash and so never counted
_STATED = re.compile(r"answer\s*(?:is\s*:?|:)(.+?)(?:\.\s|$)", re.IGNORECASE | re.MULTILINE)
_COMPUTER_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))[eE]([+-]?[0-9]{1,9})")


def agrees(answer: str, truths: tuple[str, ...]) -> bool:
    """Return whether an answer (what \\boxed{} holds) equals one of the truths: as text, or else for math-verify.

    An answer that math-verify cannot parse, raises on, or does not finish within SECONDS of CPU time is wrong. This
    runs in another process, so it works in any thread.

    >>> agrees(r"\\frac{2}{4}", ("0.5",)), agrees("x=5", ("4", "5")), agrees("x=6", ("4", "5"))
    (True, True, False)
    """
    answer, truths = _normalise(answer), tuple(map(_normalise, truths))
    return bool(answer) and (answer in truths or is_equal(answer, truths))


def verifies(truth: str) -> bool:
    """Return whether math-verify can parse a truth and finds it equal to itself; otherwise only the same text is right.

    >>> verifies(r"\\frac{1}{2}"), verifies("]")
    (True, False)
    """
    text = _normalise(truth)
    return is_equal(text, (text,), as_text=False)


def _normalise(text: str) -> str:
    """Strip dollars and superfluous spaces; write 4.5e33, which math-verify reads as Euler's e, as a power of ten."""
    text = " ".join(text.replace(r"\$", "").replace("$", "").split())
    if number := _COMPUTER_NUMBER.fullmatch(text):
        return rf"{number[1]} \times 10^{{{int(number[2])}}}"
    return text


def boxed_answer(response: str) -> str | None:
    """Return the content of the last \\boxed{...}; None if there is none or it is empty or unclosed.

    >>> boxed_answer(r"First \\boxed{1}, no: $\\boxed{\\frac{1}{2}}$.")
    '\\\\frac{1}{2}'
    """
    *_, last = [None, *_BOXED.finditer(response)]
    if last is None:
        return None
    depth = 1
    for brace in _BRACES.finditer(response, last.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return response[last.end() : brace.start()].strip() or None
    return None


def stated_answer(response: str) -> str | None:
    """Return the text after the last "answer is" or "answer:" to the end of the sentence, without emphasis.

    >>> stated_answer("So the answer is $5$. I checked it.")
    '$5$'
    """
    *_, last = [None, *_STATED.finditer(response)]
    return None if last is None else last[1].strip(" *.") or None


class _Math:
    """Both tasks: the same problems, as a chat or as text."""

    def __init__(self, name: str, chat: bool) -> None:
        self.name, self.chat = name, chat

    def questions(self, n: int | None, *, seed: int, files: Sequence[str | Path] = ()) -> list[Question]:
        """Return `n` rows of the parquet `files` (None: all), drawn without repetition."""
        if not files:
            raise InputError(
                f"task {self.name!r} takes its questions from files; give some, such as math/dsr_uniform_train.parquet"
            )
        rows = read_rows(files, ("prompt", "reward_model"))
        questions = [self.question(place, row) for place, row in rows]
        return draw_rows(questions, n, random.Random(seed), files)

    def question(self, place: str, row: dict[str, Any]) -> Question:
        """Return the question of one row; `place` says in errors where the row is."""
        prompt, model = row["prompt"], row["reward_model"]
        if not isinstance(model, dict) or "ground_truth" not in model:
            raise InputError(f"{place}: `reward_model` is {model!r:.60}; wanted a struct with `ground_truth`")
        truths = read_truths(place, model["ground_truth"])
        messages = _messages(place, prompt)
        plain = isinstance(prompt, str) or not self.chat
        return Question("\n\n".join(m["content"] for m in messages) if plain else messages, truths)

    def reward(self, response: str, question: Question) -> float:
        """Return 1 if the answer is right, else 0."""
        return self.grade(response, question).reward

    def grade(self, response: str, question: Question) -> Grade:
        """Grade the content of the last \\boxed{}, the only good form; without any \\boxed, the text after the last
        "answer is" counts too, for a base model that does not know the form yet.
        """
        answer = boxed_answer(response)
        format_ok = answer is not None
        if "\\boxed" not in response:
            answer = stated_answer(response)
        right = answer is not None and agrees(answer, question.answer)
        return Grade(float(right), correct=right, format_ok=format_ok)


math_chat = _Math("math", chat=True)
math_plain = _Math("math-plain", chat=False)


def read_truths(place: str, value: Any) -> tuple[str, ...]:
    """Return the texts of all right answers in a ground truth as the data sets write it.

    >>> read_truths("row 0", 142.0), read_truths("row 1", '["1/2", "0.5"]'), read_truths("row 2", "[0,1]")
    (('142',), ('1/2', '0.5'), ('[0,1]',))
    """
    given = value.tolist() if hasattr(value, "tolist") else value  # numpy's arrays and numbers
    if isinstance(given, str) and re.match(r'\s*\[\s*"', given):
        given = _decode(given)
    texts = [_truth_text(one) for one in (given if isinstance(given, list | tuple) else [given])]
    if not texts or None in texts:
        raise InputError(f"{place}: the ground truth is {value!r:.60}; give a text, a finite number or a list of these")
    return tuple(texts)


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # it only starts like a list


def _truth_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else repr(value)


def _messages(place: str, prompt: Any) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise InputError(f"{place}: the prompt is {prompt!r:.60}; give a text or a chat ([{{role, content}}, …])")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    role, content = message.get("role"), message.get("content")
    return isinstance(role, str) and isinstance(content, str) and bool(content.strip())
