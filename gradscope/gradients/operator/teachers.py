"""Teachers of divergences: refused where they do not fit the policy or its tokens, and frozen while they are run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from gradscope.errors import InputError
from gradscope.gradients.frozen import measuring
from gradscope.objective import Quantity, make_quantity
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch


@contextmanager
def teaching(quantities: Sequence[Quantity], length: int) -> Iterator[None]:
    """Enter `measuring` for the teachers of these quantities; length: of the longest sequence."""
    with ExitStack() as stack:
        for model in {id(q.teacher): q.teacher_model for q in quantities if q.teacher is not None}.values():
            stack.enter_context(measuring(model, length))
        yield


def settle_quantity(of: Quantity | str, model: Policy | nn.Module, batch: TokenBatch) -> Quantity:
    """Return the quantity, if it can be measured. Raises InputError for an unknown name or an unfit teacher."""
    quantity = make_quantity(of)
    if quantity.teacher is not None:
        refuse_other_teacher(model, quantity.teacher)
    elif quantity.asks_teacher:
        _check_candidates(batch, _width(model))
        if quantity.top_of == "policy":
            raise InputError("the policy's own likeliest tokens have no log ν in a log; give a teacher")
    return quantity


def refuse_other_teacher(model: Policy | nn.Module, teacher: Policy | nn.Module) -> None:
    """Raise InputError unless the teacher is another model with the policy's vocabulary."""
    if _network(teacher) is _network(model):
        raise InputError("the teacher is the policy itself, from which it does not differ; load the teacher on its own")
    if (own := _width(model)) != (theirs := _width(teacher)):
        raise InputError(f"the teacher has {theirs} logits, the policy {own}; give one with the policy's vocabulary")
    words = [getattr(each, "tokenizer", None) for each in (model, teacher)]
    if None not in words and words[0].get_vocab() != words[1].get_vocab():
        raise InputError("the teacher's tokenizer is another than the policy's; give a teacher with the policy's ids")


def _network(model: Policy | nn.Module) -> nn.Module:
    return model.model if isinstance(model, Policy) else model


def _width(model: Policy | nn.Module) -> int:
    """Return the number of logits."""
    head = _network(model).get_output_embeddings()
    return getattr(head, "out_features", None) or head.weight.shape[0]


def _check_candidates(batch: TokenBatch, width: int) -> None:
    if not batch.candidates:
        raise InputError(
            "the batch has no candidates of a teacher; give teacher_top_ids and teacher_top_logprobs, or a teacher "
            "(--teacher)"
        )
    ids, logprobs = (values[batch.response_mask] for values in batch.candidates)
    known = logprobs > -torch.inf
    ascending = torch.where(known, ids, -1).sort(-1).values
    twice = (ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] >= 0)
    if not known.any(1).all() or twice.any() or not ((ids[known] >= 0) & (ids[known] < width)).all():
        raise InputError(
            f"every kept token needs a candidate, each once, with an id below {width}, the number of logits; see "
            "teacher_top_ids"
        )
    if not (logprobs[known] <= 0).all():
        raise InputError("teacher_top_logprobs has NaN or numbers above 0; give natural logarithms of probabilities")
