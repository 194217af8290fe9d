"""Prompts and responses logged as text or as chat messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradscope.errors import InputError, show
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import need

if TYPE_CHECKING:
    from gradscope.policy import Policy


def prompt_of(record: Record, name: str) -> Any:
    """Return the prompt: a string, or a chat without nulls from parquet.

    Raises InputError for a chat that ends with an assistant's turn: trainers open a new turn after it, whereas
    gradscope continues it.
    """
    prompt = need(record, name)
    if not isinstance(prompt, list):
        return prompt
    chat = [_without_nulls(message) for message in prompt]
    if chat and isinstance(chat[-1], dict) and chat[-1].get("role") == "assistant":
        raise InputError(
            f"{record.place}: `{name}` ends with an assistant's turn, after which the trainer opened another; give "
            "native rows with `prompt_ids`"
        )
    return chat


def response_of(record: Record, name: str) -> Any:
    """Return the response's text: a string, or the content of a single assistant message."""
    response = need(record, name)
    if not isinstance(response, list):
        return response
    messages = [_without_nulls(message) for message in response]
    if not messages:
        return ""
    single = len(messages) == 1 and isinstance(messages[0], dict) and messages[0].get("role") == "assistant"
    if not single or not isinstance(messages[0].get("content", ""), str) or messages[0].keys() - {"role", "content"}:
        raise InputError(
            f"{record.place}: `{name}` is {show(messages)}; only a single assistant message of plain text can be "
            "tokenized again (tool calls and several turns cannot); give native rows with `response_ids`"
        )
    return messages[0].get("content", "")


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


TOOL_OUTPUT = re.compile(
    r"</?(tool_response|tool_result|tool_output|function_results?|function_response|interpreter|information|observation)>"
    r"|\[TOOL_RESULTS\]"
)
"""Tags that chat templates and tool environments put around tool output; tool calls are the policy's own tokens."""
SHOWS_TOOLS = (
    "their text shows a tool's output, which the log does not mask: these tokens count as sampled, though the trainer "
    "left them out of its loss"
)


SHOWS_TURNS = (
    "their text shows the opening of another answer: the tokens of all turns count as sampled, though the trainer left "
    "those between the policy's own out of its loss"
)
THOUGHT = re.compile(r"<think>\s*(</think>)?\s*\Z")
"""Thinking tags that a template may append when it opens an answer."""


def opening_of(policy: Policy | None) -> str | None:
    """Return how the chat template opens an answer, without special tokens (`assistant`); None without a template."""
    tokenizer = policy.tokenizer if policy else None
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    chat, how = [{"role": "user", "content": ""}], {"tokenize": False, **(policy.chat_template_kwargs or {})}
    try:
        closed, opened = (tokenizer.apply_chat_template(chat, add_generation_prompt=o, **how) for o in (False, True))
    except Exception:  # a template is a program, may raise anything, and may not accept this chat
        return ""
    text = opened.removeprefix(closed) if opened.startswith(closed) else ""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return THOUGHT.sub("", text).strip()


def ends_with_opening(prompt: str, opening: str) -> bool:
    """Return whether a prompt without special tokens ends with the template's opening of an answer."""
    return THOUGHT.sub("", prompt).rstrip().endswith(opening)


def others_in(response: Any, opening: str | None, special: Sequence[str] = ()) -> tuple[str, ...]:
    """Return remarks on a response that contains tool output or several turns.

    opening: result of `opening_of`; on a line of its own it starts another turn. special: special tokens to ignore.
    """
    if not isinstance(response, str):
        return ()
    for token in special:
        response = response.replace(token, "")
    remarks = (SHOWS_TOOLS,) if TOOL_OUTPUT.search(response) else ()
    if not remarks and opening and re.search(rf"\n[ \t]*{re.escape(opening)}[ \t]*\n", response):
        remarks = (SHOWS_TURNS,)
    return remarks
