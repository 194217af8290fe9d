"""TRL's trainers on given text (SFT, DPO, KTO): where their log π is seen, and the weighting that their loss is.

They ask a model for log π of its labels, `model(…, fused_lm_head=True).log_probs`, position by position. Here a batch
of theirs has the layout of GRPOTrainer's: a row's prompt ends before the first token that the loss keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from gradscope.errors import InputError
from gradscope.integrations.trl.batch import Inputs, kept_tokens
from gradscope.integrations.trl.internals import KL, metrics_of, summing_squares
from gradscope.integrations.trl.losses import ON_TEXT, find_kind, own_loss
from gradscope.integrations.trl.watch import SeenBatch, StepWatcher
from gradscope.objective import LossSettings

SFT_LOSSES = {"nll": "sft", "dft": "dft"}
DPO_LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}
"""TRL's loss type → the weighting that it is."""


def is_on_text(trainer: Any) -> bool:
    """Return whether the trainer is one of ON_TEXT. Raises InputError for trainers that cannot be watched."""
    return find_kind(trainer) in ON_TEXT


def watch_steps(
    trainer: Any, *, with_squares: bool = False, on_unseen: Callable[[Any, SeenBatch], None] | None = None
) -> StepWatcher:
    """Return the `StepWatcher` of a trainer, with these settings. Raises InputError if its log π is not to be seen."""
    settings = {"with_squares": with_squares, "on_unseen": on_unseen}
    if not is_on_text(trainer):
        return StepWatcher(trainer, **settings)
    if (hidden := _hides(trainer)) is not None:
        raise InputError(f"{hidden}: tokens of given text are not seen there; switch it off, or leave gradscope out")
    return TextWatcher(trainer, **settings)


class TextWatcher(StepWatcher):
    """Records the micro-batches of a trainer on given text, in the layout of GRPOTrainer's.

    A token's advantage is −∂loss/∂ log π: above 0 where the loss makes it likelier.
    """

    @contextmanager
    def _looking(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> Iterator[SeenBatch]:
        trainer, kind, laid = self.trainer, find_kind(self.trainer), lay_out(inputs)
        if kind == "SFTTrainer":
            laid |= {"groups": torch.arange(len(inputs["input_ids"])), "num_items": num_items_in_batch}
        modules = {id(m): m for m in (model, trainer.model, getattr(trainer, "ref_model", None)) if m is not None}
        squares = summing_squares(without_gradients=False) if self.with_squares else nullcontext()
        with super()._looking(model, laid) as part, squares:
            look = partial(self._take_outputs, part, inputs["input_ids"])
            hooks = [each.register_forward_hook(look, with_kwargs=True) for each in modules.values()]
            try:
                yield part
            finally:
                for hook in hooks:
                    hook.remove()
            if kind == "KTOTrainer" and (z0 := metrics_of(trainer)[KL]):
                laid["z0"] = torch.full((len(laid["prompt_ids"]),), float(z0[-1]))

    def _take_outputs(self, part: SeenBatch, ids: Tensor, _: Any, args: Any, given: dict[str, Any], out: Any) -> None:
        """Take what a pass over the batch gives: with gradients the policy's, without the reference's."""
        logprobs, own = getattr(out, "log_probs", None), given.get("input_ids")
        if logprobs is None or own is None or not (own is ids or torch.equal(own, ids.to(own.device))):
            return  # another text, such as KTO's mismatched pairs
        if not logprobs.requires_grad:
            part.inputs["ref_per_token_logps"] = place(part.inputs, logprobs)
        elif part.logprob is None and (out.log_sum_sq_probs is not None or not self.with_squares):
            part.logprob, part.entropy = place(part.inputs, logprobs), place(part.inputs, out.entropy)
            if out.log_sum_sq_probs is not None:
                part.log_sum_squares = place(part.inputs, out.log_sum_sq_probs)
            self._follow(part, logprobs, out.entropy, out.aux_loss)

    def _take_slope(self, part: SeenBatch, gradient: Tensor) -> None:
        super()._take_slope(part, gradient)
        part.slope = place(part.inputs, part.slope)
        part.inputs["advantages"] = -part.slope


def lay_out(inputs: Inputs) -> dict[str, Any]:
    """Return a batch of texts [B, S] as GRPOTrainer's inputs: prompts padded on the left, completions on the right.

    `tool_mask`, if some are left out, has the completion's tokens that the loss keeps; `places` [B, C] where they are
    in the text, of `width` S; `pair` and `chosen` [B] what a preference batch tells.
    """
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    kept = inputs["labels"] != -100 if "labels" in inputs else inputs["completion_mask"].bool()
    kept = kept & real
    kept[:, 0] = False  # nothing predicts it
    columns = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(real, columns + 1, 0).amax(1)
    starts = torch.where(kept, columns, last[:, None]).amin(1)
    ends = torch.where(kept, columns + 1, starts[:, None]).amax(1)
    before = starts[:, None] - torch.arange(int(starts.max()), 0, -1, device=ids.device)
    after = starts[:, None] + torch.arange(max(1, int((ends - starts).max())), device=ids.device)
    inside, known = after < ends[:, None], before >= 0
    before, after = before.clamp(min=0), after.clamp(max=ids.shape[1] - 1)
    laid = {
        "prompt_ids": ids.gather(1, before),
        "prompt_mask": (known & real.gather(1, before)).long(),
        "completion_ids": torch.where(inside, ids.gather(1, after), 0),
        "completion_mask": inside.long(),
        "places": after,
        "width": ids.shape[1],
    }
    own = inside & kept.gather(1, after)
    if not torch.equal(own, inside):
        laid["tool_mask"] = own.long()
    if "pixel_values" in inputs:
        laid["pixel_values"] = inputs["pixel_values"]
    if "label" in inputs:
        return laid | {"chosen": inputs["label"].float()}
    if "labels" in inputs:
        return laid
    pairs = torch.arange(len(ids) // 2).repeat(2)  # TRL's batch has the chosen first
    return laid | {"groups": pairs, "pair": pairs, "chosen": (torch.arange(len(ids)) < len(ids) // 2).float()}


def place(laid: Inputs, values: Shaped[Tensor, "B S-1"]) -> Shaped[Tensor, "B C"]:
    """Return a batch's values of each next token at its completions; 0 where nothing is kept. Virtual tokens of an
    adapter come first."""
    own = values.detach()[:, -(laid["width"] - 1) :].gather(1, (laid["places"] - 1).to(values.device))
    return torch.where(kept_tokens(laid).bool().to(values.device), own, torch.zeros_like(own))


def text_loss(trainer: Any) -> LossSettings:
    """Return the weighting that the trainer's loss is. Raises InputError, by name, for a loss that is none."""
    if (other := own_loss(trainer) or _is_other(trainer)) is not None:
        raise InputError(
            f"{other}: no weighting of gradscope's is that loss, so rows cannot name it; leave the writer out"
        )
    kind = find_kind(trainer)
    if kind == "SFTTrainer":
        return LossSettings(weighting=SFT_LOSSES[trainer.args.loss_type])
    known = {"beta": trainer.beta}
    if kind == "KTOTrainer":
        known |= {"desirable": trainer.desirable_weight, "undesirable": trainer.undesirable_weight}
    name = "kto" if kind == "KTOTrainer" else DPO_LOSSES[trainer.loss_types[0]]
    return LossSettings(weighting=f"{name}:{','.join(f'{key}={float(value)!r}' for key, value in known.items())}")


def text_denominators(trainer: Any, window: Sequence[Inputs]) -> Float[Tensor, " B"]:
    """Return TRL's divisor of each text's terms in one optimizer step over these micro-batches, in this process.

    SFT: tokens of the step, over processes; or, where the trainer does not count them, of the micro-batch, times the
    number of micro-batches; DPO: pairs of the micro-batch; KTO: its texts, each times that number.
    """
    kind, steps, parts = find_kind(trainer), len(window), []
    for laid in window:
        size = len(laid["prompt_ids"])
        if kind != "SFTTrainer":
            divisor = steps * size / (2 if kind == "DPOTrainer" else 1)
        elif laid["num_items"] is None:
            divisor = steps * float(kept_tokens(laid).sum())
        else:
            shared = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
            divisor = float(laid["num_items"]) / shared
        parts.append(torch.full((size,), max(1.0, divisor)))
    return torch.cat(parts)


def _hides(trainer: Any) -> str | None:
    """Name the first setting under which a token's log π cannot be seen, or told from its neighbours'; None: none."""
    if getattr(trainer, "padding_free", False):
        return "padding_free, or packing other than 'wrapped', puts several texts into a row"
    if getattr(trainer, "compute_loss_func", None) is not None:
        return "compute_loss_func makes the loss of whole logits"
    if find_kind(trainer) == "SFTTrainer" and trainer.label_smoother is not None and trainer.args.loss_type == "nll":
        return f"label_smoothing_factor is {trainer.args.label_smoothing_factor}, for which TRL takes whole logits"
    cut = trainer.accelerator.parallelism_config
    if cut is not None and (cut.cp_enabled or cut.sp_enabled):
        return "context or sequence parallelism cuts texts into pieces"
    return None


def _is_other(trainer: Any) -> str | None:
    """Name the first setting that takes the loss of one of ON_TEXT outside the weightings; None: none."""
    if trainer.aux_loss_enabled:
        return f"router_aux_loss_coef is {trainer.router_aux_loss_coef}"
    kind, types = find_kind(trainer), getattr(trainer, "loss_types", [getattr(trainer.args, "loss_type", None)])
    known = {"SFTTrainer": SFT_LOSSES, "DPOTrainer": DPO_LOSSES, "KTOTrainer": ("kto",)}[kind]
    if len(types) > 1 or types[0] not in known:
        return f"loss_type is {', '.join(map(repr, types))}, not one of {', '.join(known)}"
    if kind == "SFTTrainer":
        return None
    if trainer.precompute_ref_logps:
        return "precompute_ref_log_probs keeps log π_ref of whole responses alone"
    if kind == "KTOTrainer":
        return None
    if trainer.f_divergence_type != "reverse_kl":
        return f"f_divergence_type is {str(trainer.f_divergence_type)!r}"
    if trainer.ld_alpha is not None:
        return f"ld_alpha is {trainer.ld_alpha}"
    if trainer.use_weighting:
        return "use_weighting multiplies pairs by WPO's weights"
    return None if trainer.loss_weights == [1.0] else f"loss_weights is {trainer.loss_weights}"
