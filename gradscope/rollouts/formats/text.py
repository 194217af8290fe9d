"""Prompts and responses logged as text or as chat messages."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradscope.errors import InputError, show
from gradscope.runs import parse_json

if TYPE_CHECKING:
    from gradscope.policy import Policy

AS_STRING = "their prompt or response is a chat written as a string (JSON or Python): it was read as the chat"
LIKE_CHAT = (
    "their prompt or response looks like a chat written as a string, but is neither JSON nor Python: it counts as "
    "plain text, without the chat template"
)
CHAT = re.compile(r"\s*(\{\s*['\"]messages['\"]\s*:\s*)?\[\s*\{\s*['\"](role|content)['\"]\s*:")
"""How a chat begins that was written as a string."""


def read_prompt(
    value: Any, place: str, *, is_chat: bool = False, opens_turn: bool = True
) -> tuple[Any, tuple[str, ...]]:
    """Return a prompt (a string, or a chat without nulls from parquet), and remarks.

    is_chat: whether it must be a chat, which may be JSON. opens_turn: refuses a chat that ends with an assistant's
    turn, after which the trainer opens a new turn, whereas gradscope continues it.
    """
    prompt, remarks = _parse_chat(value, is_chat=is_chat)
    if is_chat and isinstance(prompt, str):
        raise InputError(f"{place} is {show(value)}; give a chat, as JSON")
    if not isinstance(prompt, list):
        return prompt, remarks
    chat = [without_nulls(message) for message in prompt]
    if opens_turn and chat and isinstance(chat[-1], dict) and chat[-1].get("role") == "assistant":
        raise InputError(
            f"{place} ends with an assistant's turn, after which the trainer opened another; give native rows with "
            "`prompt_ids`"
        )
    return chat, remarks


def read_response(value: Any, place: str, *, is_chat: bool = False, **_: bool) -> tuple[Any, tuple[str, ...]]:
    """Return a response's text (a string, or the content of a single assistant message), and remarks."""
    response, remarks = _parse_chat(value, is_chat=is_chat)
    if not isinstance(response, list):
        return response, remarks
    messages = [without_nulls(message) for message in response]
    if not messages:
        return "", remarks
    single = len(messages) == 1 and isinstance(messages[0], dict) and messages[0].get("role") == "assistant"
    if not single or not isinstance(messages[0].get("content", ""), str) or messages[0].keys() - {"role", "content"}:
        raise InputError(
            f"{place} is {show(messages)}; only a single assistant message of plain text can be tokenized again (tool "
            "calls and several turns cannot); give native rows with `response_ids`"
        )
    return messages[0].get("content", ""), remarks


def _parse_chat(value: Any, *, is_chat: bool) -> tuple[Any, tuple[str, ...]]:
    """Return a chat that was written as a string or under `messages`, and remarks; anything else as it is."""
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return value["messages"], ()
    if not isinstance(value, str) or not (is_chat or CHAT.match(value)):
        return value, ()
    listed = re.sub(r"\}\s*\n\s*\{", "}, {", value)  # as numpy prints a list, without commas
    for parse, text in ((parse_json, value), (_parse_python, value), (_parse_python, listed)):
        try:
            found = parse(text)
        except ValueError:
            continue
        found = found.get("messages") if isinstance(found, dict) else found
        if isinstance(found, list) and all(
            isinstance(one, dict) and {"role", "content"} <= one.keys() for one in found
        ):
            return found, () if is_chat else (AS_STRING,)
    return value, (LIKE_CHAT,)


def _parse_python(text: str) -> Any:
    """Return the literal in a text. Raises ValueError if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that are none
            return ast.literal_eval(text.strip())
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error


def without_nulls(message: Any) -> Any:
    """Return a message without the nulls that tables put at the keys of other messages, but with its own content.

    >>> without_nulls({"role": "user", "content": None, "name": None, "tool_calls": [{"id": 1, "type": None}]})
    {'role': 'user', 'content': None, 'tool_calls': [{'id': 1}]}
    """
    if isinstance(message, list):
        return [without_nulls(one) for one in message]
    if not isinstance(message, dict):
        return message
    return {name: without_nulls(v) for name, v in message.items() if v is not None or name == "content"}


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
TWICE_THOUGHT = (
    "the thinking tags with which their prompt ends begin the response's text, too: they occur twice, and those of the "
    "response count as sampled (if the template put them in, as with enable_thinking=false, leave them out of one)"
)
CUT = "their text is cut inside a character (it ends in �): the tokens of that part are unknown, and are left out"
GARBLED = (
    "their text holds � for bytes that are no character: tokenized again, they give other tokens than were sampled"
)
UNPARSED = (
    "their text holds {}, a special token that this tokenizer does not find in text: it was tokenized letter by "
    "letter; give ids if the trainer's had the token"
)
TAIL = 32
"""Tokens at a prompt's end among which thinking tags are looked for."""


def special_words(tokenizer: Any) -> dict[str, int]:
    """Return the special tokens that text may hold, and their ids; of mistral-common, its control tokens."""
    if tokenizer is None:
        return {}
    added = getattr(tokenizer, "added_tokens_decoder", None)
    known = {str(token): i for i, token in added.items() if token.special} if isinstance(added, dict) else {}
    return known | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def doubts_of(texts: Sequence[Any], ids: Sequence[list[int]], policy: Policy, words: dict[str, int]) -> list[str]:
    """Return remarks on a prompt and a response that were tokenized again. texts: None for one that was logged as ids.

    words: result of `special_words`.
    """
    remarks = []
    if isinstance(texts[1], str):
        found = THOUGHT.search(policy.decode(ids[0][-TAIL:]))
        begins = found and "".join(texts[1][:200].split()).startswith("".join(found[0].split()))
        remarks = [TWICE_THOUGHT] if begins else []
        remarks += [GARBLED] if "\ufffd" in texts[1].rstrip("\ufffd") else []
    for text, own in zip(texts, ids, strict=True):
        lost = (
            [word for word, token in words.items() if word in text and token not in own]
            if isinstance(text, str)
            else []
        )
        remarks += [UNPARSED.format(lost[0])] if lost else []
    return remarks


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
