"""Prompts with a reward: one file per task, registered by name; users can add tasks in their own files."""

from gradscope.tasks import arithmetic, knights_knaves, math, word_problems
from gradscope.tasks.data import draw_questions
from gradscope.tasks.registry import (
    Grade,
    Question,
    Task,
    get_task,
    grade_response,
    questions_hash,
    register,
    task_names,
)

register(knights_knaves.knights_knaves)
register(knights_knaves.knights_knaves_compact)
register(math.math_chat)
register(math.math_plain)
register(arithmetic.arithmetic)
register(word_problems.word_problems)
register(word_problems.word_problems_plain)
register(word_problems.word_problems_examples)

__all__ = [
    "Grade", "Question", "Task", "draw_questions", "get_task", "grade_response", "questions_hash", "register",
    "task_names",
]  # fmt: skip
