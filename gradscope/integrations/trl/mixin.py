"""Token weightings for TRL's GRPOTrainer, by method overrides; Reweight (Eq. 4), Lopti (Alg. 1): arXiv:2505.12929."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.integrations.trl import internals
from gradscope.integrations.trl.batch import kept_tokens, trl_settings
from gradscope.objective import ORDERS, StepRule, Weighting, check_weighting, make_weighting, weigh_step

Number = int | float


class ReweightLoptiMixin(internals.OverriddenMethods):
    """Put before GRPOTrainer, or before your own subclass of it: `class Mine(ReweightLoptiMixin, GRPOTrainer)`.

    With no argument given, every update is GRPOTrainer's, bit for bit.

    With Lopti, each step trains both of its groups before the next step: L1 H1 L2 H2, following the paper's text, not
    the authors' sweep L1 L2 H1 H2. The two steps of a pair share one learning rate: the schedule and global_step
    advance once per pair. A pass without tokens takes no step. Callbacks get on_pre_optimizer_step and
    on_optimizer_step for each pass. In the log, `grad_norm` is the last pass's and `lopti/grad_norm_low` (or `_high`)
    the first's, before clipping; `lopti/tokens_low` and `lopti/tokens_high` count tokens per step, and `loss` is the
    sum over both passes. `kl` and the means of `clip_ratio` are over all tokens, as in TRL. `total_flos` omits the
    second pass. Evaluation is not split.

    vLLM's importance weights multiply the changed advantages, as they do TRL's own. `use_liger_kernel` is allowed: in
    TRL 1.16 it changes layers, not the loss.

    Args:
        reweight_alpha: α of Reweight; None: off. Each token's Â becomes [α·π_old + 1 − α]·Â, with TRL's own
            `old_per_token_logps` or, if TRL keeps none because the batch is on-policy, the current log-probabilities.
        lopti_eta: η of Lopti; None: off. Each optimizer step of TRL becomes two: all micro-batches with the tokens of
            π_old < η, clip, step; then all of them again with the other tokens, clip, step. Both use the same π_old.
            Tokens outside a pass contribute neither a policy nor a KL gradient to it, and each pass keeps the loss's
            own denominators, which count all tokens.
        lopti_order: "low-first", or "high-first" for the reverse order.
        weighting: Instead of these, any weighting of one optimizer step, as for `gradscope compare` ("cispo",
            "top-entropy:q=0.1", "FILE.py:NAME"). Its w_t replace those of the policy part of TRL's loss, with TRL's own
            denominators; the KL part stays. Thresholds (quantiles, covariances) are over the micro-batch's tokens, like
            TRL's top_entropy_quantile. Nothing is clipped, so `clip_ratio` is 0 in the log.

    Raises:
        InputError: for unsupported settings. With any method: TRL's trainers with another loss (GMPOTrainer,
            RLOOTrainer), ratios of whole sequences (importance_sampling_level="sequence") and loss_type "vespo". With
            Lopti also DeepSpeed, FSDP, fp16, LOMO, several processes, the entropy bonus and an auxiliary loss (they
            would count twice), top_entropy_quantile and off_policy_mask_threshold (their tokens change between passes).
            With `weighting` also a loss_type other than grpo, bnpo, dr_grpo and dapo, top_entropy_quantile,
            off_policy_mask_threshold, a KL part that use_bias_correction_kl multiplies by the ratio, and vLLM's
            importance weights if the weighting itself uses the sampler's log-probabilities.
    """

    def __init__(
        self,
        *args: Any,
        reweight_alpha: Number | None = None,
        lopti_eta: Number | None = None,
        lopti_order: str = "low-first",
        weighting: str | Weighting | None = None,
        **keywords: Any,
    ) -> None:
        if weighting is not None and (reweight_alpha is not None or lopti_eta is not None):
            raise InputError("weighting is given beside reweight_alpha or lopti_eta; give one of them")
        weighting = make_weighting(weighting) if isinstance(weighting, str) else weighting
        if weighting is not None and (pair := weighting.alpha_and_eta) is not None:
            (reweight_alpha, lopti_eta), weighting = pair, None
        self.weighting = weighting
        self.rule = StepRule(reweight_alpha, lopti_eta, lopti_order)
        self.reweight_alpha, self.lopti_eta, self.lopti_order = reweight_alpha, lopti_eta, lopti_order
        self._lopti_pass: str | None = None
        self._lopti_window: list[dict[str, Any]] = []
        self._lopti_counts: list[Tensor] = []
        self._lopti_replays = False
        self._on_logprobs: Callable[[Tensor, Tensor | None], None] | None = None
        super().__init__(*args, **keywords)
        internals.check_internals(self)
        _refuse_unsupported(self)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run TRL's step; with Lopti, the first pass's backward pass and, on the last micro-batch, its optimizer step
        and the second pass.
        """
        if self.lopti_eta is None:
            return super().training_step(model, inputs, num_items_in_batch)
        first, second = ORDERS[self.lopti_order]
        try:
            self._lopti_pass = first
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self.accelerator.sync_gradients:
                started, self._lopti_pass = time.perf_counter(), second
                loss = loss + self._finish_pair(model, num_items_in_batch, first, second)
                internals.metrics_of(self)[internals.STEP_TIME][-1] += time.perf_counter() - started
        finally:
            self._lopti_pass = None
        return loss

    def _finish_pair(self, model: Any, num_items_in_batch: Any, first: str, second: str) -> Tensor:
        """Step on the first pass's gradient, then compute the second pass's gradient; return the latter's loss."""
        window, counts = self._lopti_window, torch.stack(self._lopti_counts).sum(0).tolist()
        self._lopti_window, self._lopti_counts = [], []
        count = dict(zip(("low", "high"), counts, strict=True))
        metrics = internals.metrics_of(self)
        for name in ("low", "high"):
            metrics[f"lopti/tokens_{name}"].append(float(count[name]))
        loss = torch.zeros((), device=self.accelerator.device)
        if not count[first]:
            model.zero_grad()  # None, not 0: on a gradient of 0 an optimizer would still apply decay and momentum
        if not count[second]:
            for name in internals.ADDITIVE:
                metrics[name] += [0.0] * (len(window) if name in metrics else 0)
            return loss
        if count[first]:
            self._step_first(model, first)
        self._lopti_replays = True
        try:
            for index, inputs in enumerate(window):
                with nullcontext() if index == len(window) - 1 else self.accelerator.no_sync(model=model):
                    loss = loss + self._backward_again(model, inputs, num_items_in_batch)
        finally:
            self._lopti_replays = False
        return loss

    def _step_first(self, model: Any, name: str) -> None:
        """Do what Trainer does between the last micro-batch and the next step, except for schedule and counters."""
        internals.metrics_of(self)[f"lopti/grad_norm_{name}"].append(internals.clip_gradient(self, model))
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        model.zero_grad()

    def _backward_again(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """Run Trainer's own training step, since GRPOTrainer's would count these micro-batches as new."""
        from transformers import Trainer

        return Trainer.training_step(self, model, inputs, num_items_in_batch)

    def _prepare_by(self, prepare: Callable[..., Any], generation_batch: Any) -> Any:
        return generation_batch if self._lopti_replays else prepare(generation_batch)

    def _make_loss_by(self, compute_loss: Callable[..., Tensor], model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute TRL's loss with advantages (and, in a pass of Lopti, the reference) changed by token."""
        if self.weighting is None and self.reweight_alpha is None and self._lopti_pass is None:
            return compute_loss(model, inputs)
        # π_old may only be known from the loss's own forward pass, so advantages are set after it. If a release of TRL
        # used them earlier, the loss would be NaN.
        changed = inputs | {"advantages": torch.full_like(inputs["advantages"], float("nan"))}
        change = self._change if self.weighting is None else self._weigh
        self._on_logprobs = lambda logprobs, entropies: change(inputs, changed, logprobs, entropies)
        loss = compute_loss(model, changed)
        if self._on_logprobs is not None:
            self._on_logprobs = None
            raise RuntimeError(f"TRL's loss requested no log-probabilities; that of TRL {internals.WORKS_WITH} does")
        if self._lopti_pass is not None:
            metrics = internals.metrics_of(self)
            for name in internals.ADDITIVE:
                if metrics.get(name):
                    metrics[name][-1] *= 2  # the log's mean over both passes is then the sum of their parts
        return loss

    def _hear(self, found: tuple) -> tuple:
        """Tell `_on_logprobs` of what TRL's method found."""
        if (tell := self._on_logprobs) is not None:
            self._on_logprobs = None
            tell(found[0].detach(), found[1])
        return found

    def _weigh(
        self, inputs: dict[str, Any], changed: dict[str, Any], logprobs: Float[Tensor, "B C"], entropies: Tensor | None
    ) -> None:
        """Set advantages to the weighting's w_t, and the ratio to 1, so that TRL's policy loss has the slope −Â."""
        known = {"entropy": entropies, "sampler_logprobs": inputs.get("sampling_per_token_logps")}
        old, settings = inputs.get("old_per_token_logps", logprobs), trl_settings(self.args).loss
        tokens = (logprobs, old, _by_token(inputs["advantages"], logprobs), kept_tokens(inputs).bool())
        changed["advantages"] = weigh_step(self.weighting, *tokens, settings, **known)
        changed["old_per_token_logps"] = logprobs

    def _change(
        self, inputs: dict[str, Any], changed: dict[str, Any], logprobs: Float[Tensor, "B C"], entropies: Tensor | None
    ) -> None:
        """Set the advantages for Reweight and the current pass, by π_old."""
        old = inputs.get("old_per_token_logps", logprobs)
        advantages = _by_token(inputs["advantages"], logprobs)
        advantages = self.rule.advantages(advantages, old)
        if self._lopti_pass is not None:
            chosen = self._choose(inputs, old)
            advantages = advantages.masked_fill(~chosen, 0.0)
            if "ref_per_token_logps" in inputs:  # with itself as reference, a token has no KL and no KL gradient
                changed["ref_per_token_logps"] = torch.where(chosen, inputs["ref_per_token_logps"], logprobs)
        changed["advantages"], changed["old_per_token_logps"] = advantages, old

    def _choose(self, inputs: dict[str, Any], old: Float[Tensor, "B C"]) -> Bool[Tensor, "B C"]:
        """Return the tokens of the pass; in the first pass, keep the micro-batch for the second."""
        chosen = dict(self.rule.groups(old, kept_tokens(inputs).bool()))
        if not self._lopti_replays:
            self._lopti_window.append(inputs | {"old_per_token_logps": old})
            self._lopti_counts.append(torch.stack([chosen["low"].sum(), chosen["high"].sum()]))
        return chosen[self._lopti_pass]


def _by_token(advantages: Tensor, logprobs: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
    return advantages if advantages.dim() == 2 else advantages[:, None].expand(logprobs.shape)


def _goes_by_sampler(weighting: Weighting) -> bool:
    """Return whether the weighting uses the sampler's log-probabilities."""
    try:
        check_weighting(weighting, sampler_logprobs=False)
    except InputError:
        return True
    return False


def _refuse_unsupported(trainer: Any) -> None:
    """Raise InputError for settings under which the methods would not do what their names say."""
    args, methods = trainer.args, {"reweight_alpha": trainer.reweight_alpha, "lopti_eta": trainer.lopti_eta}
    methods["weighting"] = trainer.weighting
    given = [name for name, value in methods.items() if value is not None]
    if not given:
        return
    owners = [kind for kind in type(trainer).__mro__ if internals.LOSS[0] in vars(kind)]
    others = [kind.__name__ for kind in owners if kind.__module__.startswith("trl.") and kind.__name__ != "GRPOTrainer"]
    if others:
        raise InputError(f"{given[0]} does not work with {others[0]}, whose loss differs; leave one of the two out")
    reasons = {
        f"importance_sampling_level={args.importance_sampling_level!r}": args.importance_sampling_level != "token",
        "loss_type='vespo'": args.loss_type == "vespo",
    }
    if trainer.weighting is not None:
        check_weighting(trainer.weighting, sampler_logprobs=args.use_vllm)
        reasons |= {
            f"loss_type={args.loss_type!r}": args.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo"),
            "top_entropy_quantile < 1": args.top_entropy_quantile < 1,
            "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
            "use_bias_correction_kl": args.beta != 0 and args.use_bias_correction_kl,
            "vllm_importance_sampling_correction (it would correct for the sampler twice)": (
                args.use_vllm and args.vllm_importance_sampling_correction and _goes_by_sampler(trainer.weighting)
            ),
        }
    if trainer.lopti_eta is not None:
        given = ["lopti_eta"]
        reasons |= {
            "DeepSpeed": trainer.is_deepspeed_enabled,
            "FSDP": trainer.is_fsdp_enabled,
            "several processes": trainer.accelerator.num_processes > 1,
            "fp16": args.fp16,
            f"optim={str(args.optim.value)!r}": "lomo" in args.optim.value,
            "an entropy bonus": args.entropy_coef != 0 or args.use_adaptive_entropy,
            "an auxiliary loss (router_aux_loss_coef)": trainer.aux_loss_enabled,
            "top_entropy_quantile < 1": args.top_entropy_quantile < 1,
            "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise InputError(f"{given[0]} does not work with {found[0]}; switch one of the two off")
