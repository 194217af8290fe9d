"""SkyRL's trainer.dump_data_batch: {export_path}/dumped_data/global_step_{N}_training_input.pkl, a padded batch.

`action_log_probs` are the trainer's own log-probabilities, `rollout_logprobs` the sampler's; losses with ratios to the
sampler's skip the trainer's forward pass, so `action_log_probs` are missing. `loss_mask` keeps the trained tokens,
including an end-of-sequence token that SkyRL appends to responses that stopped without one.
"""

from __future__ import annotations

import re

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import IMAGES, ROUTED, Answers, Format, Row, pick, row_by_row

NAMES = {
    "prompt_ids": "sequences",
    "response_ids": "sequences",
    "response_mask": "loss_mask",
    "advantage": "advantages",
    "old_logprobs": "action_log_probs",
    "logprobs": "action_log_probs",
    "sampler_logprobs": "rollout_logprobs",
    "ref_logprobs": "base_action_log_probs",
    "group": "policy_prompt_boundaries",
}
FILLED_UP = "they are padding of SkyRL's batch, not samples"


def _row(record: Record, policy: Policy | None) -> Row:
    named = re.search(r"global_step_([0-9]{1,18})", record.path.name)
    step = int(named[1]) if named else None
    if record.columns["is_padding"] or record.columns["has_images"]:
        return Row(record.place, {}, step, left_out=FILLED_UP if record.columns["is_padding"] else IMAGES)
    own = {native: native if native in ("prompt_ids", "response_ids") else name for native, name in NAMES.items()}
    columns, labels = pick(record, own | {"group": "prompt"}), dict(NAMES)
    if "old_logprobs" not in columns and "sampler_logprobs" in columns:
        columns["old_logprobs"], labels["old_logprobs"] = columns.pop("sampler_logprobs"), "rollout_logprobs"
    return Row(record.place, columns, step, labels, remarks=(ROUTED,) if record.columns["is_routed"] else ())


SKYRL = Format(
    "skyrl",
    needs=frozenset({"sequences", "attention_mask", "response_mask", "loss_mask"}),
    knows="advantages returns values action_log_probs base_action_log_probs rollout_logprobs",
    rows=row_by_row(_row),
    notes=(
        "ratios are relative to SkyRL's action_log_probs (the trainer's own, before the step) if the log has them, "
        "otherwise to its rollout_logprobs; its corrections for the sampler's are not applied",
    ),
    answers=Answers(
        group="the batch's `policy_prompt_boundaries`; otherwise identical prompts of a step",
        step="the number in the file name: training steps from 1; asynchronous trainers may have sampled with earlier "
        "checkpoints",
        sampled="those that `loss_mask` keeps, including an end-of-sequence token that SkyRL appends and trains on "
        "(its sampler's log π is 0, which a note counts)",
        logprobs="`action_log_probs`: the trainer's, at its temperature, denominator of the ratios; "
        "`rollout_logprobs`: the sampler's",
        left_out="padding of SkyRL's batch; batches with images",
        checked="0.3.0: its own code (0.2.0 writes the same, 0.1.0's own code too), 2026-11-27",
    ),
)
