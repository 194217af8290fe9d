"""Token gradients of log π from forward or backward passes that are not the model's own, in place of its passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gradscope.gradients import TokenJacobian, Vectors
from gradscope.objective import TokenStatistics
from gradscope.policy import layer_settings, takes, without_packing

if TYPE_CHECKING:
    from gradscope.updates.auditing.readings import Readings

Change = Callable[[], AbstractContextManager[None]]
"""Changes the model's passes, and restores them."""
WIDE = 1 << 30
"""A window that is wider than any row."""


class ChangedJacobian(TokenJacobian):
    """The Jacobian of log π under other passes."""

    def __init__(self, exact: TokenJacobian, change: Change, known: TokenStatistics | None = None) -> None:
        """known: the statistics, if the forward pass is the model's own."""
        super().__init__(exact.policy, exact.batch, exact.resources)
        self._change, self._known = change, known

    @property
    def statistics(self) -> TokenStatistics:
        if self._known is not None:
            return self._known
        with without_packing(), self._change():
            return super().statistics

    def vjp(self, weights: Float[Tensor, "R K"], of: Any = "logprob") -> Vectors:
        with without_packing(), self._change():
            return super().vjp(weights, of)


class PassRow(NamedTuple):
    """A row as a pass is given it."""

    ids: list[int]
    prompt: int
    """How many of them are the prompt's."""
    dropped: Bool[Tensor, " n"]
    """Tokens of the response that the log's mask drops."""


def takes_positions(model: nn.Module) -> bool:
    """Return whether positions can be given to a model; an adapter passes them on to its base."""
    return takes(getattr(model, "get_base_model", lambda: model)(), "position_ids")


def backward_passes(readings: Readings) -> Iterator[tuple[str, float | None, TokenJacobian]]:
    """Yield each fault of the backward pass alone that the model can have, and the Jacobian with it."""
    model, rows = readings.J.model, _rows(readings)
    inputs = [module for name, module in model.named_modules() if ".lora_A." in name]
    found: list[tuple[str, Change]] = [("adapter-inputs-detached", partial(_detaching_inputs, inputs))] * bool(inputs)
    if any(row.prompt > 1 for row in rows):
        found.append(("prompts-detached", partial(_detaching_prompts, model, rows)))
    for name, change in found:
        yield name, None, ChangedJacobian(readings.J, change, readings.J.statistics)


def forward_passes(readings: Readings) -> Iterator[tuple[str, float | None, TokenJacobian]]:
    """Yield each fault of the forward pass that the model and the batch can have, its number, and the Jacobian."""
    for name, value, change in _changes(readings):
        yield name, value, ChangedJacobian(readings.J, change)
    own = readings.J
    for name, power in (("temperature-squared", 2), ("temperature-inverse", -1)) if readings.scales else ():
        batch = replace(own.batch, temperature=own.batch.temperature**power)
        yield name, None, TokenJacobian(own.policy, batch, own.resources)


def _changes(readings: Readings) -> Iterator[tuple[str, float | None, Change]]:
    model, rows = readings.J.model, _rows(readings)
    head, longest = model.get_output_embeddings(), max(len(row.ids) for row in rows)
    if _goes_on(model, rows[0].ids[:2]):
        yield "head-bare", None, partial(_ending_at_head, model)
    if getattr(head, "bias", None) is not None and head.bias.any():
        yield "head-unbiased", None, partial(_without_bias, head)
    settings = {"window-ignored": ("sliding_window", WIDE), "attention-uncapped": ("attn_logit_softcapping", None)}
    for fault, (name, value) in settings.items():
        known = [own for own in layer_settings(model, name) if own is not None]
        if known and (value is None or min(known) < longest):
            yield fault, None, partial(_setting, model, name, value)
    counts = ("", "-uncounted") if takes_positions(model) else ("",)
    for token in sorted(_ends(readings)):
        if any(token in row.ids[1:-1] for row in rows):
            for way in counts:
                hidden = partial(_hiding, model, lambda row, token=token: torch.tensor(row.ids) == token)
                yield f"ends-unseen{way}", token, partial(hidden, rows, counted=not way)
    if any(row.dropped.any() for row in rows):
        yield "dropped-unseen", None, partial(_hiding, model, lambda row: row.dropped, rows)
    if takes_positions(model):
        yield "positions-restarting", None, partial(_restarting, model, rows)
    yield from (("adapter-scaled", scale, change) for scale, change in _scales(model))


def _rows(readings: Readings) -> list[PassRow]:
    batch, found = readings.J.batch, []
    for ids, real, place, kept in zip(
        batch.input_ids, batch.attention_mask, readings.positions, readings.kept, strict=True
    ):
        inside = place[real] >= 0
        found.append(PassRow(ids[real].tolist(), int((~inside).sum()), inside & ~kept[real]))
    return sorted(found, key=lambda row: -len(row.ids))


def _ends(readings: Readings) -> set[int]:
    """Return the tokens that may be padding."""
    policy = readings.J.policy
    pads = (getattr(policy.model.config, "pad_token_id", None), getattr(policy.tokenizer, "pad_token_id", None))
    return {*policy.stop_ids, *(pad for pad in pads if pad is not None)}


@torch.no_grad()
def _goes_on(model: nn.Module, ids: list[int]) -> bool:
    """Return whether the model does anything to logits after its head."""
    given = torch.tensor([ids], device=next(model.parameters()).device)
    found: list[Tensor] = []
    with _hooked(model.get_output_embeddings().register_forward_hook(lambda _, __, logits: found.append(logits))):
        logits = model(input_ids=given, use_cache=False).logits
    return bool(found) and not torch.equal(logits, found[-1].to(logits.dtype))


@contextmanager
def _hooked(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ending_at_head(model: nn.Module) -> AbstractContextManager[None]:
    """Return the head's own output as the logits."""
    found: list[Tensor] = []

    def leave_head(_: nn.Module, __: tuple[Any, ...], logits: Tensor) -> None:
        found[:] = [logits]

    def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        output.logits = found.pop()
        return output

    head = model.get_output_embeddings()
    return _hooked(head.register_forward_hook(leave_head), model.register_forward_hook(leave))


def _without_bias(head: nn.Module) -> AbstractContextManager[None]:
    return _hooked(head.register_forward_hook(lambda head, _, logits: logits - head.bias))


@contextmanager
def _setting(model: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Give every configuration and module that has a setting another."""
    owners = {id(own): own for m in model.modules() for own in (m, getattr(m, "config", None)) if own is not None}
    before = [(own, known) for own in owners.values() if (known := getattr(own, name, None)) is not None]
    try:
        for own, _ in before:
            setattr(own, name, value)
        yield
    finally:
        for own, known in before:
            setattr(own, name, known)


def _entering(model: nn.Module, change: Callable[[Int[Tensor, "b n"], dict[str, Any]], None]) -> Any:
    """Register what changes a pass's arguments; returns the handle."""

    def enter(_: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
        given = dict(given)
        change(given["input_ids"], given)
        return args, given

    return model.register_forward_pre_hook(enter, with_kwargs=True)


def _fill(ids: Int[Tensor, "b n"], rows: list[PassRow], values: Callable[[PassRow], Tensor], rest: Tensor) -> Tensor:
    """Return rest [b, n] with each known row's values in front of its padding; rows: longest first."""
    out = rest.clone()
    for place, own in enumerate(ids.tolist()):
        known = next((row for row in rows if row.ids == own[: len(row.ids)]), None)
        if known is not None:
            out[place, : len(known.ids)] = values(known).to(out)
    return out


def _hiding(
    model: nn.Module, hidden: Callable[[PassRow], Tensor], rows: list[PassRow], *, counted: bool = True
) -> AbstractContextManager[None]:
    """Hide tokens of known rows from attention. counted: in positions, nevertheless."""

    def change(ids: Tensor, given: dict[str, Any]) -> None:
        seen = _fill(ids, rows, lambda row: ~hidden(row), torch.ones_like(ids))
        given["attention_mask"] = seen
        if not counted:
            given["position_ids"] = (seen.cumsum(-1) - 1).clamp(min=0)

    return _hooked(_entering(model, change))


def _restarting(model: nn.Module, rows: list[PassRow]) -> AbstractContextManager[None]:
    """Let positions restart at each response."""

    def places(row: PassRow) -> Tensor:
        own = torch.arange(len(row.ids))
        return torch.where(own < row.prompt, own, own - row.prompt)

    def change(ids: Tensor, given: dict[str, Any]) -> None:
        given["position_ids"] = _fill(ids, rows, places, torch.arange(ids.shape[1]).to(ids).expand(ids.shape))

    return _hooked(_entering(model, change))


def _scales(model: nn.Module) -> Iterator[tuple[float, Change]]:
    """Yield other scales of an adapter: 1, α/r and α/√r; the number is the first module's."""
    modules = [module for module in model.modules() if getattr(module, "lora_alpha", None)]
    for scale in (lambda alpha, r: 1.0, lambda alpha, r: alpha / r, lambda alpha, r: alpha / r**0.5):
        others = [{name: scale(m.lora_alpha[name], m.r[name]) for name in m.scaling} for m in modules]
        if any(own != module.scaling for own, module in zip(others, modules, strict=True)):
            yield next(iter(others[0].values())), partial(_scaling, modules, others)


@contextmanager
def _scaling(modules: list[Any], scales: list[dict[str, float]]) -> Iterator[None]:
    before = [module.scaling for module in modules]
    try:
        for module, own in zip(modules, scales, strict=True):
            module.scaling = own
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.scaling = own


def _detaching_inputs(modules: list[nn.Module]) -> AbstractContextManager[None]:
    return _hooked(*(m.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:])) for m in modules))


def _detaching_prompts(model: nn.Module, rows: list[PassRow]) -> AbstractContextManager[None]:
    """Let no gradient into what is computed at the prompts' tokens but the last, of which others see keys and values.

    Keys and values are what some module without others in it returns.
    """
    head, now = model.get_output_embeddings(), {}

    def change(ids: Tensor, _: dict[str, Any]) -> None:
        cut = _fill(ids, rows, lambda row: torch.arange(len(row.ids)) < row.prompt - 1, torch.zeros_like(ids))
        now["cut"] = cut.bool()[..., None]

    def leave(_: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        cut = now["cut"]
        if isinstance(out, Tensor) and out.is_floating_point() and out.dim() == 3 and out.shape[:2] == cut.shape[:2]:
            return torch.where(cut, out.detach(), out)
        return out

    leaves = [m for m in model.modules() if m is not head and not any(True for _ in m.children())]
    return _hooked(_entering(model, change), *(m.register_forward_hook(leave) for m in leaves))
