"""Watch a trainer's own passes: each micro-batch's inputs, its tokens' log π, and ∂loss/∂ log π as it comes back."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import TrainerCallback

from gradscope.integrations.trl.batch import Inputs, kept_tokens
from gradscope.integrations.trl.internals import LOGPROBS, LOSS, NORM, check_internals, summing_squares
from gradscope.policy import unpacked

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Turns a method into one that also observes its arguments or result."""
WRAPPED = "_gradscope_wrapped"
"""Attribute of a watched object: the observers' wrappers, and the instance's own versions of these methods."""
BESIDE = ("the entropies", "the routers' auxiliary loss")
"""What TRL's method returns beside log π."""


@dataclass
class SeenBatch:
    """Tensors that a trainer computed for one micro-batch's loss, [B, C] over completions, on its device."""

    inputs: Inputs
    logprob: Tensor | None = None
    """None: the loss did not ask TRL's method for it."""
    entropy: Tensor | None = None
    log_sum_squares: Tensor | None = None
    """log Σ_j π_j², if asked for."""
    kept_by_masks: list[Tensor] = field(default_factory=list)
    """Masks that multiply the loss, apart from the completion's; [B, C] or [B, 1]."""
    slope: Tensor | None = None
    """∂loss/∂ log π from the backward pass; None: not yet, or never, known."""

    @property
    def kept(self) -> Bool[Tensor, "B C"]:
        return kept_tokens(self.inputs).bool()

    @property
    def old(self) -> Tensor:
        """log π_old, or log π if the trainer keeps no log π_old per token."""
        return self.inputs.get("old_per_token_logps", self.logprob)


class StepWatcher:
    """Records the micro-batches of a trainer's optimizer steps; nothing is computed that the trainer does not compute.

    Slopes are what its backward pass brings to log π, whatever its loss; under fp16 without the loss's scale. What else
    a loss has a gradient through is named in `left_out`, with a warning: the entropies and the routers' loss, by what
    comes back to them; tokens that its masks leave out; and terms of the weights that do not go through TRL's log π
    (also if they are multiplied by 0), by the loss's graph.

    Args:
        watched: whether the next step is recorded; set at its beginning.
        with_squares: also record log Σπ², for which TRL's head makes one more output.
        on_unseen: called with the model and a micro-batch whose loss did not ask TRL for log π (or whose head gave no
            log Σπ²), once that loss is computed.
    """

    def __init__(
        self, trainer: Any, *, with_squares: bool = False, on_unseen: Callable[[Any, SeenBatch], None] | None = None
    ) -> None:
        check_internals(trainer, head=with_squares)
        self.trainer, self.with_squares, self.on_unseen, self.watched = trainer, with_squares, on_unseen, True
        self.parts: list[SeenBatch] = []
        """The step's micro-batches so far."""
        self.norm: Any = None
        """The step's gradient norm before clipping, if the trainer has computed it; a number or a tensor."""
        self.left_out: list[str] = []
        """What the losses since `start` have a gradient through beside the kept tokens' log π."""
        self._told = 0
        """How many of these were warned of."""
        self.current: SeenBatch | None = None
        """The micro-batch whose loss is being computed."""
        self._ways: list[Any] = []
        """The graph's nodes of what TRL's method returned for it."""

    def start(self, wrappers: Mapping[str, Wrapper] | None = None) -> None:
        """Watch the trainer from now on, with further wrappers of its methods."""
        own = {LOSS[1]: self._watch_loss, NORM: self._watch_norm}
        own |= {LOGPROBS: self._watch_logprobs} if hasattr(self.trainer, LOGPROBS) else {}
        wrap(self.trainer, self, own | dict(wrappers or {}))
        self.left_out, self._told = [], 0

    def stop(self) -> None:
        wrap(self.trainer, self)
        self.parts = []

    def begin_step(self, *, watched: bool = True) -> None:
        self.parts, self.norm, self.watched = [], None, watched

    def seen(self) -> list[SeenBatch]:
        """Return the step's micro-batches whose slopes are known, once it has gone backward."""
        found = [part for part in self.parts if part.slope is not None]
        if any(bool((part.slope.ne(0) & ~part.kept).any()) for part in found):
            self._leave_out("tokens that its masks leave out")
        for name in self.left_out[self._told :]:
            warnings.warn(
                f"gradscope: the loss has a gradient through {name}, too, which is left out beside that of the kept "
                "tokens' log π",
                stacklevel=3,
            )
        self._told = len(self.left_out)
        return found

    def score(self, model: Any, part: SeenBatch) -> bool:
        """Fill in log π, entropies and log Σπ² by one more forward pass; False if the head does not provide the last.

        The model is in eval mode, since dropout would draw random numbers that training then lacks.
        """
        sides = ("prompt", "completion")
        ids, mask = (torch.cat([part.inputs[f"{side}_{kind}"] for side in sides], 1) for kind in ("ids", "mask"))
        training = [module for module in model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            with torch.no_grad(), unpacked(model):
                tokens = (ids, mask, part.inputs["completion_ids"].shape[1])
                log_probs = getattr(self.trainer, LOGPROBS)
                found, part.log_sum_squares = _with_squares(log_probs, model, *tokens, compute_entropy=True)
        finally:
            for module in training:
                module.training = True
        part.logprob, part.entropy = found[:2]
        return part.log_sum_squares is not None

    def _watch_loss(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        def watched(model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            if not (self.watched and model.training):
                return compute_loss(model, inputs, *args, **keywords)
            with self._looking(model, inputs, **keywords) as part:
                self.parts.append(part)
                found = compute_loss(model, inputs, *args, **keywords)
                loss = found[0] if isinstance(found, tuple) else found
                if part.logprob is not None and _reaches_weights(loss, self._ways):
                    self._leave_out("terms of the weights that do not go through TRL's log π")
            if part.logprob is None and self.on_unseen is not None:
                self.on_unseen(model, part)
            return found

        return watched

    @contextmanager
    def _looking(self, model: Any, inputs: Any, **_: Any) -> Iterator[SeenBatch]:
        """Yield a micro-batch to fill in while its loss is computed."""
        self.current = SeenBatch(inputs)
        try:
            yield self.current
        finally:
            self.current, self._ways = None, []

    def _watch_logprobs(self, log_probs: Callable[..., Any]) -> Callable[..., Any]:
        def scored(model: Any, *args: Any, **keywords: Any) -> Any:
            part, squares = self.current, None
            if part is None or part.logprob is not None or not torch.is_grad_enabled():
                return log_probs(model, *args, **keywords)
            if self.with_squares:
                found, squares = _with_squares(log_probs, model, *args, **keywords)
            else:
                found = log_probs(model, *args, **keywords)
            if found[0].requires_grad and (squares is not None or not self.with_squares):
                part.logprob, part.log_sum_squares = found[0].detach(), squares
                part.entropy = None if found[1] is None else found[1].detach()
                self._follow(part, *found)
            return found

        return scored

    def _follow(self, part: SeenBatch, logprobs: Tensor, *beside: Tensor | None) -> None:
        """Take what comes back to log π, and see what comes back to the values of BESIDE."""
        logprobs.register_hook(partial(self._take_slope, part))
        known = [(name, value) for name, value in zip(BESIDE, beside, strict=False) if value is not None]
        for name, value in known:
            if value.requires_grad:
                value.register_hook(partial(self._take_beside, name))
        self._ways = [each.grad_fn for each in (logprobs, *(value for _, value in known))]

    def _take_slope(self, part: SeenBatch, gradient: Tensor) -> None:
        scaler = getattr(self.trainer.accelerator, "scaler", None)  # fp16's, a power of two
        part.slope = gradient.detach().clone() if scaler is None else gradient.detach() / scaler.get_scale()

    def _take_beside(self, name: str, gradient: Tensor | None) -> None:
        if name not in self.left_out and gradient is not None and bool(gradient.any()):  # None: from DDP's outputs
            self._leave_out(name)

    def _leave_out(self, name: str) -> None:
        if name not in self.left_out:
            self.left_out.append(name)

    def _watch_norm(self, own_norm: Callable[..., Any]) -> Callable[..., Any]:
        def normed(*args: Any, **keywords: Any) -> Any:
            self.norm = norm = own_norm(*args, **keywords)
            return norm

        return normed


class Watching(TrainerCallback):
    """A callback that watches a trainer's own passes, and counts the time that its own calls take."""

    def __init__(self, trainer: Any, watcher: StepWatcher) -> None:
        self.trainer, self._watcher = trainer, watcher
        self.seconds = self.cpu_seconds = 0.0
        """Wall time, and this thread's CPU time, inside the calls of this callback since training began. What Σπ² adds
        inside TRL's head is not in them."""
        self._warned: set[str] = set()
        """Kinds of warnings given."""

    @contextmanager
    def _counted(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - wall
            self.cpu_seconds += time.thread_time() - cpu

    def _warn_once(self, kind: str, words: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"gradscope: {words}", stacklevel=4)

    @property
    def _tokenizer(self) -> Any:
        return getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)


def _reaches_weights(loss: Tensor, known: Sequence[Any]) -> bool:
    """Return whether the loss's graph leads to a leaf otherwise than through these nodes."""
    seen, ahead = set(known), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if hasattr(node, "variable"):
            return True
        seen.add(node)
        ahead += [each for each, _ in node.next_functions]
    return False


def wrap(watched: Any, looker: object, wrappers: Mapping[str, Wrapper] | None = None) -> None:
    """Wrap an object's methods of these names, replacing the looker's earlier wrappers; None removes them.

    Wrappers of other lookers stay; once the last is removed, the object is as before.
    """
    lookers, own = vars(watched).setdefault(WRAPPED, ({}, {}))
    for name, method in own.items():
        vars(watched).pop(name, None)
        if method is not None:
            setattr(watched, name, method)
    own.clear()
    lookers.pop(id(looker), None)
    if wrappers is not None:
        lookers[id(looker)] = wrappers
    for name in {name for each in lookers.values() for name in each}:
        own[name] = vars(watched).get(name)
    for each in lookers.values():
        for name, make in each.items():
            setattr(watched, name, make(getattr(watched, name)))


def set_on(watched: Any, name: str) -> Any:
    """Return the version of a method that was set on the object itself, before it was wrapped; None: its class's."""
    _, own = vars(watched).get(WRAPPED, ({}, {}))
    return own[name] if name in own else vars(watched).get(name)


def temperature_of(trainer: Any) -> float:
    """Return the temperature of a trainer's log π; 1 on given text."""
    return float(getattr(trainer, "temperature", 1.0))


def _with_squares(log_probs: Callable[..., Any], model: Any, *args: Any, **keywords: Any) -> tuple[Any, Tensor | None]:
    """Return the result of log_probs, and log Σπ² of the same tokens; None if the head does not provide it."""
    squares: list[Tensor | None] = []
    hook = model.register_forward_hook(lambda _, __, out: squares.append(out.log_sum_sq_probs))
    try:
        with summing_squares():
            found = log_probs(model, *args, **keywords)
    finally:
        hook.remove()
    if any(each is None for each in squares):
        return found, None
    return found, torch.cat(squares)[:, -found[0].shape[1] :]
