"""SkyRL's trainer.dump_data_batch: {export_path}/dumped_data/global_step_{N}_training_input.pkl, a padded batch.

`action_log_probs` are the trainer's own log-probabilities, `rollout_logprobs` the sampler's; losses with ratios to the
sampler's skip the trainer's forward pass, so `action_log_probs` are missing. `loss_mask` keeps the trained tokens,
including an end-of-sequence token that SkyRL appends to responses that stopped without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import FILLED_UP, IMAGES, ROUTED, Format, Row, optional, required
from gradscope.rollouts.formats.columns import read_row


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    for record in records:
        named = re.search(r"global_step_([0-9]{1,18})", record.path.name)
        row = read_row(SKYRL, record, {"step": int(named[1]) if named else None})
        about = record.columns["is_padding"], record.columns["has_images"]
        if any(about):
            yield Row(row.place, {}, row.step, left_out=FILLED_UP if about[0] else IMAGES)
        else:
            yield replace(row, remarks=(ROUTED,) if record.columns["is_routed"] else ())


SKYRL = Format(
    "skyrl",
    (
        *required(response_mask="loss_mask", sampled="response_mask", sequences="sequences"),
        *required(attention_mask="attention_mask"),
        *optional(prompt_ids="prompt_ids", response_ids="response_ids", group="prompt"),
        *optional(old_logprobs="action_log_probs", advantage="advantages"),
        *optional(sampler_logprobs="rollout_logprobs", ref_logprobs="base_action_log_probs"),
        *optional(old_logprobs="rollout_logprobs"),
    ),
    _rows,
    suffix=".pkl",
    notes=(
        "ratios are relative to SkyRL's action_log_probs (the trainer's own, before the step) if the log has them, "
        "otherwise to its rollout_logprobs; its corrections for the sampler's are not applied",
    ),
)
