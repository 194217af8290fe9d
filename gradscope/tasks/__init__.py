"""Prompts with a reward, one file per task, registered by name; a user adds a task in a file of their own."""

from gradscope.tasks import knights_knaves
from gradscope.tasks.registry import Grade, Question, Task, get_task, grade_response, register, task_names

register(knights_knaves.knights_knaves)
register(knights_knaves.knights_knaves_compact)

__all__ = ["Grade", "Question", "Task", "get_task", "grade_response", "register", "task_names"]
