"""prime-rl's token exports: token_exports/step_{n}/rank_{r}.jsonl, a line per sequence, with a marker file STABLE.

Every array is as long as token_ids, and entry s belongs to token s; non-finite values are null. loss_mask keeps the
tokens of all three loss terms; rl_weights, if present, gives each token's weight in the policy-gradient term.
"""

from __future__ import annotations

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import Answers, Format, Row, row_by_row, whole_number
from gradscope.rollouts.formats.sequences import split_sequence

PER_TOKEN = {
    "advantage": "advantages",
    "old_logprobs": "inference_logprobs",
    "logprobs": "trainer_logprobs",
    "sampler_logprobs": "inference_logprobs",
    "entropy": "entropy",
    "clipped": "is_masked",
}


def _row(record: Record, policy: Policy | None) -> Row:
    step = whole_number(record, "step")
    arrays = {"ids": "token_ids", "mask": "loss_mask", "per_token": PER_TOKEN, "weights": "rl_weights"}
    return split_sequence(record, **arrays, columns={}, step=step)


PRIME_RL = Format(
    "prime_rl",
    needs=frozenset({"token_ids", "loss_mask", "inference_logprobs"}),
    knows=(
        "schema_version step export_step rank micro_step micro_sequence_idx export_sequence_idx run_id env_name "
        "position_ids advantages rewards losses trainer_logprobs entropy mismatch_kl log_importance_ratio "
        "importance_ratio prob_delta is_masked is_masked_high is_masked_low rl_weights ce_weights "
        "ref_kl_weights"
    ),
    rows=row_by_row(_row),
    notes=(
        "ratios are of prime-rl's trainer_logprobs to its inference_logprobs, as in training",
        "the log does not identify prompts: sequences of a step with the same tokens before the first trained one form "
        "a group",
    ),
    is_finished=lambda path: (path.parent / "STABLE").exists(),
    answers=Answers(
        group="the same tokens before the first trained one, within a step",
        step=(
            "`step`, from 1; `step_N` is the checkpoint after it; weights up to `max_off_policy_steps` older may "
            "have sampled it (not in the log)"
        ),
        sampled="those that `loss_mask` keeps and whose `rl_weights` are not 0; the weights multiply advantages",
        logprobs=(
            "`inference_logprobs`: vLLM's, denominator of the ratios, as in training; `trainer_logprobs`: the "
            "trainer's, at the sampling temperature"
        ),
        left_out="files without a marker STABLE",
        checked="prime-rl 559b4477 (2026-08-21): a writer after its source; 2026-11-27",
    ),
)
