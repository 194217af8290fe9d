"""Engine for verl (0.9.1) that takes Lopti's two optimizer steps per mini-batch (Alg. 1, arXiv:2505.12929).

    VERL_USE_EXTERNAL_MODULES=gradscope.integrations.verl,gradscope.integrations.verl_engine \\
    VERL_ENGINE_VENDOR=gradscope python -m verl.trainer.main_ppo ... \\
        +actor_rollout_ref.actor.policy_loss.lopti_eta=0.5     (and the rest as in gradscope.integrations.verl)

verl registers its engines by model type, strategy, device and vendor, and VERL_ENGINE_VENDOR selects the vendor; if the
vendor has no engine, as for the critic, verl uses its own. Without `lopti_eta`, this engine does exactly what verl's
does. With it, only FSDP is supported (strategies fsdp and fsdp2).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gradscope.errors import InputError
from gradscope.integrations.verl.methods import RUNNING_PASS, pass_loss, pass_mask
from gradscope.objective import ORDERS

try:
    from verl.utils.device import get_device_id
    from verl.utils.metric import AggregationType, Metric
    from verl.utils.py_functional import append_to_dict
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
except ImportError as error:
    raise ImportError("gradscope.integrations.verl_engine works inside verl: pip install verl==0.9.1") from error


class LoptiPasses:
    """Put before an engine of verl: `class Mine(LoptiPasses, FSDPEngineWithLMHead)`.

    Each mini-batch is trained twice: all its micro-batches with the tokens of one group, then with those of the other,
    each with its own clipping and optimizer step, and both with the batch's π_old. The policy, KL and entropy terms
    cover the group's tokens, divided by verl's counts of the whole mini-batch over all processes. A pass without tokens
    in any process takes no step. The learning rate schedule advances once for both steps.

    verl's log shows means over both passes; `grad_norm` is the last pass's, `lopti/grad_norm_low` and `_high` are each
    pass's norm before clipping, and `lopti/tokens_low` and `_high` count tokens over all processes. The auxiliary loss
    of a mixture of experts, which the model itself adds, would count in both passes.
    """

    def train_batch(self, data: Any, loss_function: Any) -> dict[str, Any]:
        """Train verl's batch once per pass. Raises InputError if the passes would not sum to the whole loss."""
        config = loss_function.keywords.get("config") if isinstance(loss_function, partial) else None
        settings = None if config is None else config.get("policy_loss", None)
        eta = None if settings is None else settings.get("lopti_eta", None)
        if eta is None or settings.lopti_pass is not None:
            return super().train_batch(data, loss_function)
        _refuse_unsupported(config, loss_function)
        counts = {name: self._count(data, eta, name) for name in ORDERS[settings.lopti_order]}
        taken = [name for name, count in counts.items() if count]
        outputs = [self._pass(data, loss_function, eta, name) for name in taken or counts]
        joined = outputs[-1]
        if len(outputs) == 2:
            joined = {
                "model_output": outputs[-1]["model_output"],
                "loss": outputs[0]["loss"] + outputs[1]["loss"],
                "metrics": _joined([output["metrics"] for output in outputs]),
            }
        for name, count in counts.items():
            joined["metrics"][f"lopti/tokens_{name}"] = Metric(AggregationType.MEAN, float(count))
        return joined

    def _count(self, data: Any, eta: float, name: str) -> int:
        """Count the pass's tokens over all processes."""
        chosen = pass_mask(data["old_log_probs"], data["response_mask"], eta=eta, name=name)
        count = (chosen.values() if chosen.is_nested else chosen).sum().to(get_device_id())
        torch.distributed.all_reduce(count, group=self.get_data_parallel_group())
        return int(count)

    def _pass(self, data: Any, loss_function: Any, eta: float, name: str) -> dict[str, Any]:
        """Take one of verl's optimizer steps, on the pass's tokens."""
        token = RUNNING_PASS.set(name)
        try:
            output = super().train_batch(data, pass_loss(loss_function, eta=eta, name=name))
        finally:
            RUNNING_PASS.reset(token)
        if (norm := output["metrics"].get("grad_norm")) is not None:
            output["metrics"][f"lopti/grad_norm_{name}"] = Metric(AggregationType.MEAN, float(norm))
        return output


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"], vendor="gradscope"
)
class LoptiFSDPEngine(LoptiPasses, FSDPEngineWithLMHead):
    """verl's FSDP engine with Lopti's passes."""


def _joined(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the metrics of two passes as if their micro-batches belonged to one; `grad_norm` is the last."""
    joined: dict[str, Any] = {}
    for one in metrics:
        append_to_dict(joined, {key: value for key, value in one.items() if key != "grad_norm"})
    return joined | ({"grad_norm": metrics[-1]["grad_norm"]} if "grad_norm" in metrics[-1] else {})


def _refuse_unsupported(config: Any, loss_function: partial) -> None:
    reasons = {
        "loss_agg_mode=seq-mean-token-mean, whose denominators are each pass's own": config.loss_agg_mode
        == "seq-mean-token-mean",
        "distillation, whose loss would count twice": loss_function.keywords.get("distillation_config") is not None,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise InputError(f"lopti_eta does not work with {found[0]}; switch one of the two off")
