"""rLLM's episodes, one JSON file each: {log}/episodes/train_step_{n}_epoch_{e}/episode_….json.

An episode has trajectories, which have steps; a step is one answer in its chat. The trainer's logger keeps only text;
`Episode.to_dict` and `rllm eval` also write ids and the sampler's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import AS_TEXT, EVALUATED, Column, Format, Row, need, need_objects, whole_number
from gradscope.rollouts.formats.prime_rl import FAILED
from gradscope.rollouts.formats.text import read_prompt

UNTOLD = (
    "the log has no ids for them, and their text cannot be tokenized again: thoughts, tool calls, or a chat that does "
    "not end in the answer"
)
UNNAMED = "default_traj_name"
IDS = {"prompt_ids": "prompt_ids", "response_ids": "response_ids", "old_logprobs": "logprobs", "advantage": "advantage"}


def _rows(records: Iterable[Record], _policy: Policy | None) -> Iterator[Row]:
    for record in records:
        number = whole_number(record, "training_step")
        trajectories = need_objects(record, "trajectories")
        if record.path.parent.name.startswith("val_step_"):
            yield Row(record.place, {}, number, left_out=EVALUATED)
        elif not any(trajectory.get("steps") for trajectory in trajectories):
            yield Row(record.place, {}, number, left_out=FAILED)
        else:
            for at, trajectory in enumerate(trajectories):
                own = Record(record.path, f"{record.place}, trajectory {at}", trajectory)
                name = trajectory.get("name", UNNAMED)
                role = f"{name}_{at}" if name == UNNAMED else name
                # An episode's id is {task}:{number of the rollout}.
                task = str(need(record, "episode_id" if "episode_id" in record.columns else "id")).split(":")[0]
                yield from _trajectory_rows(own, {"group": (task, role)}, number)


def _trajectory_rows(trajectory: Record, columns: dict[str, Any], number: int | None) -> Iterator[Row]:
    """Yield a row per step. All have the trajectory's reward, or else its last step's, which counts once."""
    steps = need_objects(trajectory, "steps")
    rewards = [trajectory.columns.get("reward"), *(step.get("reward") for step in steps[-1:])]
    columns = columns | {"reward": next((reward for reward in rewards if reward is not None), None)}
    for at, step in enumerate(steps):
        place, counts = f"{trajectory.place}, step {at}", at == len(steps) - 1
        known = {native: step[own] for native, own in IDS.items() if step.get(own) not in (None, [])}
        if "prompt_ids" in known:
            known = {"response_ids": []} | known
            yield Row(place, columns | known, number, IDS, is_counted=counts)
            continue
        text = _text(Record(trajectory.path, place, step))
        reason, remarks = (UNTOLD, ()) if text is None else (None, (AS_TEXT,))
        yield Row(place, columns | (text or {}), number, left_out=reason, remarks=remarks, is_counted=counts)


def _text(step: Record) -> dict[str, Any] | None:
    """Return a step's prompt and response, or None if its chat does not tell what was sampled."""
    chat = need_objects(step, "chat_completions")
    answer = chat[-1] if chat else {}
    content, said = answer.get("content"), step.columns.get("model_response") or answer.get("content")
    thinks = any((step.columns.get("thought"), answer.get("reasoning"), answer.get("reasoning_content")))
    has_tools = any(message.get("tool_calls") or message.get("role") == "tool" for message in chat)
    is_text = all(isinstance(message.get("content"), str) for message in chat)
    if answer.get("role") != "assistant" or said != content or thinks or has_tools or not is_text:
        return None
    return {"prompt": read_prompt(chat[:-1], f"{step.place}: the chat")[0], "response": content}


RLLM = Format(
    "rllm",
    (Column("trajectories", required=True), Column("is_correct", required=True), Column("step", "training_step")),
    _rows,
    notes=(
        "episodes that rLLM filtered or rejected after logging are included: the log does not mark them",
        "tools and chat-template arguments are not in the log: chats are rendered with the policy's own template",
    ),
)
