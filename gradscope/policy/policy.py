"""A policy: a decoder-only causal language model with its tokenizer and the location of its blocks."""

from __future__ import annotations

import inspect
import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from gradscope.errors import InputError, first_line, show
from gradscope.policy.parameters import float_parameters
from gradscope.policy.positions import find_context, find_steady_context
from gradscope.policy.upcasting import arithmetic_dtype, precision_in_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DECIDED_HERE = frozenset(
    {"conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask"}
)
"""Arguments of `apply_chat_template` that control the output format rather than the content."""
DATE = "strftime_now"
"""The function by which a chat template puts in today's date, and the template's argument that replaces it: a date."""
GENERATION = re.compile(r"\{%-?\s*generation\b")
"""What marks the assistant's tokens in a chat template."""
_DATE_MACRO = (
    "{% macro strftime_now(format) %}{{ dates_by_format[format] if format in dates_by_format else "
    "raise_exception('strftime_now of a format that is written nowhere in the template') }}{% endmacro %}{{ '' }}"
)
"""Put before a template, replaces that function; transformers turns an argument that is a function into a string."""


@dataclass(frozen=True)
class Policy:
    """A decoder-only causal language model with its tokenizer and the location of its blocks."""

    DATE: ClassVar[str] = DATE
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    """The tokenizer; None if only ids are used."""
    blocks_name: str
    """Name of the ModuleList of blocks in model.named_modules()."""
    path: str = ""
    """Folder that it was loaded from; empty for a model built in memory."""
    params: Literal["all", "adapter"] = "all"
    """Parameters to measure: all, or only the adapter's (`parameters.measure_only`)."""
    base: str | None = None
    """Folder of the base model, for an adapter."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Arguments of the chat template, such as {"enable_thinking": False}."""
    below: tuple[str, ...] = ()
    """Folders below the base, if it is itself an adapter: other adapters, and finally the whole model."""
    configured_by: str | None = None
    """Folder with the configuration and tokenizer of sharded weights; None: the weights' folder."""
    no_tokenizer: str | None = None
    """Why the tokenizer that was found cannot be used; None if there is none, or it can."""

    @property
    def parameters_in_words(self) -> str:
        """Describe the measured parameters."""
        return "all parameters" if self.params == "all" else "the adapter's parameters"

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.get_submodule(self.blocks_name)

    @property
    def config(self) -> Any:
        """The text part of the model's configuration."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: float32 if half-precision weights are upcast."""
        return arithmetic_dtype(self.model)

    @cached_property
    def vocab_size(self) -> int:
        """Number of logits per position, N in Prop. 4.2."""
        return self.config.vocab_size

    @cached_property
    def context(self) -> int | None:
        """Longest sequence (prompt + response) that the positions allow; None: no known limit."""
        return find_context(self.model)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a response: the generation configuration's, else the configuration's, else the tokenizer's."""
        for source in (getattr(self.model, "generation_config", None), self.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                return frozenset({ids} if isinstance(ids, int) else ids)
        return frozenset()

    @property
    def pad_ids(self) -> frozenset[int]:
        """Ids used only for padding, not also to begin or end text or for unknown words."""
        names = ("pad_token_id", "bos_token_id", "unk_token_id")
        pad, *others = (getattr(self.tokenizer, name, None) for name in names)
        return frozenset({pad} - {None, *others}) - self.stop_ids

    @cached_property
    def puts_in_date(self) -> bool:
        """Whether the chat template may put in today's date."""
        return any(DATE in text for text in _template_texts(self.tokenizer))

    @cached_property
    def steady_context(self) -> int | None:
        """Longest sequence up to which rotary angles do not depend on the length; None: no limit."""
        return find_steady_context(self.model)

    def why_too_long(self, length: int) -> str | None:
        """Return why a sequence of this length cannot be measured; None if it can."""
        if self.context is not None and length > self.context:
            return f"longer than the policy's context of {self.context}"
        if self.steady_context is not None and length > self.steady_context:
            return (
                f"longer than {self.steady_context}, beyond which the policy's rotary embedding (dynamic or longrope) "
                "depends on the lengths in the batch, so that a token's gradient is not well defined"
            )
        return None

    def length_notes(self, max_new_tokens: int) -> list[str]:
        """Return a note if max_new_tokens exceeds the context, else none."""
        if self.context is None or max_new_tokens <= self.context:
            return []
        words = f"the policy's context of {self.context:,} tokens, including the prompt, ends responses sooner"
        return [f"max_new_tokens is {max_new_tokens:,}; {words}"]

    def encode_prompt(
        self, prompt: str | list[dict[str, str]], *, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Encode a prompt: a string with special tokens, or a chat by its template, opened for the assistant's answer.

        BOS appears only once, even if the string was templated and already begins with it. chat_template_kwargs:
        arguments of the template, overriding the policy's.
        """
        self._need_tokenizer()
        check_prompt(prompt)
        if isinstance(prompt, str):
            ids = self._encode(prompt)
            doubled = any(ids[:many] == ids[many : 2 * many] for many in (1, 2))
            ids = _begin_once(ids, self._encode(prompt, add_special_tokens=False)) if doubled else ids
            return self._within_vocabulary(ids, prompt)
        prefilled = prompt[-1]["role"] == "assistant"
        opening = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled}
        ids = self._render(prompt, opening | self._template_arguments(chat_template_kwargs))
        return self._within_vocabulary(list(ids), prompt)

    def encode_whole(
        self,
        text: str | list[dict[str, Any]],
        *,
        opened: bool = False,
        assistant: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[int] | None]:
        """Encode a text or a chat as trainers on given text do: a string as the tokenizer does, a chat by its template.

        opened: open the chat for an answer. assistant: also return a mask of the assistant's tokens, by the template's
        generation marks. tools: for the template. chat_template_kwargs: override the policy's.
        """
        if isinstance(text, str):
            _check_text(text, "the text")
            return self._within_vocabulary(self._encode(text), text), None
        check_prompt(text)
        told = {"add_generation_prompt": opened} | self._template_arguments(chat_template_kwargs)
        told |= {"tools": tools} if tools else {}
        if not assistant:
            return self._within_vocabulary(list(self._render(text, told)), text), None
        if not any(GENERATION.search(own) for own in _template_texts(self.tokenizer)):
            raise InputError(
                "the chat template does not mark the assistant's tokens ({% generation %}), so which are trained is "
                "unknown; give the tokenizer the template that was trained with"
            )
        found = self._render(text, told | {"return_dict": True, "return_assistant_tokens_mask": True})
        return self._within_vocabulary(list(found["input_ids"]), text), found["assistant_masks"]

    def _template_arguments(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the arguments of the chat template, the given ones overriding the policy's."""
        told, tokenizer = {**(self.chat_template_kwargs or {}), **(given or {})}, self._need_tokenizer()
        if not has_template(tokenizer):
            raise InputError(
                "the prompt is a chat, but the tokenizer has no chat template; give the prompt as a string"
            )
        check_template_kwargs(tokenizer, told)
        return told

    def _render(self, chat: list[dict[str, Any]], told: dict[str, Any]) -> Any:
        """Return the ids that the chat template makes of a chat; with return_dict, under `input_ids`."""
        tokenizer = self._need_tokenizer()
        try:
            if isinstance(told.get(DATE), str):
                told |= _replace_date(tokenizer.get_chat_template(), told.pop(DATE))
            return tokenizer.apply_chat_template(chat, tokenize=True, **{"return_dict": False} | told)
        except Exception as error:  # a template is third-party code and may raise anything
            raise InputError(
                f"the tokenizer's chat template raised {type(error).__name__} ({first_line(error)}) on the chat "
                f"{str(chat)[:60]!r}; correct the chat, or give the prompt as a string"
            ) from error

    def encode_response(self, response: str) -> list[int]:
        """Encode a response's text without special tokens; no EOS is added.

        Raises InputError for text without tokens, since substitutes were not sampled.
        """
        _check_text(response, "the response")
        tokenizer = self._need_tokenizer()
        ids = self._encode(response, add_special_tokens=False)
        if self.has_unknown(response, ids):
            instead = "drop it" if tokenizer.unk_token is None else f"take {tokenizer.unk_token!r} for it"
            raise InputError(
                f"the tokenizer cannot encode parts of the response {response[:60]!r} and would {instead}; give the "
                "checkpoint that sampled it, or ids"
            )
        return self._within_vocabulary(ids, response)

    def _within_vocabulary(self, ids: list[int], text: object) -> list[int]:
        """Return the ids. Raises InputError for a token of the tokenizer that the model lacks."""
        if ids and max(ids) >= self.vocab_size:
            raise InputError(
                f"the tokenizer makes {max(ids)} of {self.decode([max(ids)])!r} in {show(text)}, but the model has "
                f"{self.vocab_size} tokens; give weights and tokenizer of one run (for an adapter, the resized base)"
            )
        return ids

    def has_unknown(self, text: object, ids: list[int]) -> bool:
        """Return whether the ids of a text or chat contain the unknown token or, for tokenizers without one, lack a
        character of the text.

        False if the unknown token also begins or ends texts (GPT-2, OPT), whose tokenizers cover every byte.
        """
        tokenizer = self._need_tokenizer()
        unknown = tokenizer.unk_token_id
        if unknown is None:
            return isinstance(text, str) and not _letters(text) <= _letters(tokenizer.decode(ids))
        if unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            return False
        return ids.count(unknown) > str(text).count(tokenizer.unk_token)

    def _encode(self, text: str, **settings: bool) -> list[int]:
        try:
            return list(self._need_tokenizer()(text, **settings).input_ids)
        except Exception as error:  # the tokenizers library raises bare Exceptions for unknown words
            raise InputError(
                f"the tokenizer cannot encode {show(text)} ({first_line(error)}); give the checkpoint that sampled it, "
                "or the ids"
            ) from error

    def decode(self, ids: list[int]) -> str:
        """Decode the ids to text, or to `<id>` without a tokenizer."""
        if self.tokenizer is None:
            return "".join(f"<{i}>" for i in ids)
        return self.tokenizer.decode(ids)

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.no_tokenizer is not None:
            raise InputError(self.no_tokenizer)
        if self.tokenizer is None:
            raise InputError(
                f"text needs a tokenizer, but {self.path or 'this policy'} has none; save one there, or give "
                "prompt_ids and response_ids"
            )
        return self.tokenizer

    def __repr__(self) -> str:
        size = f"{sum(p.numel() for p in self.model.parameters()):,} parameters"
        if self.params == "adapter":
            size += f" ({sum(p.numel() for _, p in float_parameters(self.model)):,} of an adapter, which are measured)"
        return (
            f"Policy({type(self.model).__name__}, {size}, {len(self.blocks)} blocks at "
            f"{self.blocks_name!r}, vocabulary {self.vocab_size}, "
            f"{precision_in_words(self.model)} on {self.device})"
        )


def find_blocks(model: nn.Module, name: str | None = None) -> str:
    """Find the ModuleList of blocks: the only outermost one of the configured length."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if name is not None:
        if name not in lists:
            raise InputError(f"the model has no ModuleList {name!r}; it has {', '.join(lists) or 'none'}")
        return name
    outermost = [n for n in lists if not any(n.startswith(other + ".") for other in lists)]
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [n for n in outermost if len(lists[n]) == depth] or outermost
    if len(found) != 1:
        raise InputError(
            f"{type(model).__name__} has {len(found)} candidates for its blocks "
            f"({', '.join(found) or 'no ModuleList'}); name the right one with --blocks"
        )
    return found[0]


def takes(model: nn.Module, argument: str) -> bool:
    """Return whether the model's forward (the class's or a replacement) has an argument of this name."""
    own = vars(model).get("forward")
    return argument in (_arguments(type(model)) if own is None else inspect.signature(own).parameters)


@lru_cache
def _arguments(kind: type[nn.Module]) -> frozenset[str]:
    """Return the parameters of a class's forward, cached because decoding looks them up at every step."""
    return frozenset(inspect.signature(kind.forward).parameters)


def check_prompt(prompt: Any, place: str | None = None) -> None:
    """Raise InputError if a prompt is neither a string nor a chat, or not valid UTF-8; place: its origin.

    >>> check_prompt("2+2="), check_prompt([{"role": "user", "content": "2+2="}])
    (None, None)
    """
    where = "" if place is None else f"{place}: "
    chat = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    if not (isinstance(prompt, str) or (chat and prompt)):
        raise InputError(
            f"{where}the prompt is neither a string nor a chat but {show(prompt)}; give a string or a chat "
            "([{role, content}, …])"
        )
    _check_text(prompt, f"{where}the prompt")


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer renders chats: by a template, or by code of its own (mistral-common)."""
    from transformers import PreTrainedTokenizerBase

    render = getattr(type(tokenizer), "apply_chat_template", None)
    return getattr(tokenizer, "chat_template", None) is not None or render not in (
        None,
        PreTrainedTokenizerBase.apply_chat_template,
    )


def _template_texts(tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    template = getattr(tokenizer, "chat_template", None)
    return [*template.values()] if isinstance(template, dict) else [template or ""]


def _replace_date(template: str, date: str) -> dict[str, Any]:
    """Return the arguments of `apply_chat_template` by which a template puts in this ISO date for today's."""
    formats = {text for _, text in re.findall(r"""(["'])((?:(?!\1).)*%(?:(?!\1).)*)\1""", template)}
    when = datetime.fromisoformat(date)
    return {
        "chat_template": _DATE_MACRO + template,
        "dates_by_format": {text: when.strftime(text) for text in formats},
    }


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase | None, given: Mapping[str, Any]) -> None:
    """Raise InputError for arguments that the chat template ignores or that gradscope sets itself."""
    template, texts = getattr(tokenizer, "chat_template", None), _template_texts(tokenizer)
    if isinstance(given.get(DATE), str):
        try:
            datetime.fromisoformat(given[DATE])
        except ValueError as error:
            raise InputError(
                f"chat_template_kwargs holds {DATE!r}: {show(given[DATE])}; give a date, YYYY-MM-DD"
            ) from error
    for name in given:
        if name in _DECIDED_HERE:
            raise InputError(f"chat_template_kwargs holds {name!r}, which gradscope sets itself; leave it out")
        if not any(re.search(rf"\b{re.escape(str(name))}\b", text) for text in texts):
            told = "the tokenizer's chat template does not use it" if template else "the tokenizer has no chat template"
            raise InputError(
                f"chat_template_kwargs holds {name!r}, but {told}, so it would have no effect; correct the name, or "
                "leave it out"
            )


def _begin_once(ids: list[int], bare: list[int]) -> list[int]:
    """Remove the BOS that the tokenizer added to a text that already begins with it.

    bare: the ids without special tokens.

    >>> _begin_once([1, 1, 7, 2], [1, 7]), _begin_once([1, 7, 2], [7]), _begin_once([7, 7], [7, 7])
    ([1, 7, 2], [1, 7, 2], [7, 7])
    """
    for added in range(1, len(ids) - len(bare) + 1):
        if ids[added : added + len(bare)] == bare:
            return ids[added:] if bare[:added] == ids[:added] else ids
    return ids


def _letters(text: str) -> set[str]:
    """Reduce a text to what a tokenizer must preserve, without blanks, case and accent composition."""
    return {c for c in unicodedata.normalize("NFKC", text).casefold() if not c.isspace()}


def _check_text(value: Any, name: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError for a lone surrogate
        raise InputError(f"{name} holds what is no text ({first_line(error)}); mend it") from error
