"""Checks that a batch made in Python fits a policy, equivalent to those of the readers."""

from __future__ import annotations

from gradscope.errors import InputError
from gradscope.policy import Policy
from gradscope.rollouts.batch import LARGEST, LOGPROBS, ROUNDING, TokenBatch


def check_batch(policy: Policy, batch: TokenBatch) -> None:
    """Raise InputError, naming the response, if this policy cannot be measured on the batch. NaN means unknown."""
    if batch.num_tokens == 0:
        raise InputError(
            "response_mask keeps no token, so there is nothing to measure; give responses with sampled tokens"
        )
    strange = ((batch.input_ids < 0) | (batch.input_ids >= policy.vocab_size)) & batch.attention_mask
    if strange.any():
        row, column = strange.nonzero()[0].tolist()
        raise InputError(
            f"response {row} or its prompt holds the id {int(batch.input_ids[row, column])}, outside the vocabulary of "
            f"{policy.vocab_size}; was it made with another tokenizer?"
        )
    lengths = batch.attention_mask.sum(1)
    if why := policy.why_too_long(int(lengths.max())):
        raise InputError(
            f"response {int(lengths.argmax())} and its prompt are {int(lengths.max())} tokens long, {why}; leave it "
            "out or cut it"
        )
    cold = (batch.temperature < 1 / LARGEST) | (batch.temperature > LARGEST)
    if cold.any():
        row = int(cold.int().argmax())
        raise InputError(
            f"the temperature of response {row} is {float(batch.temperature[row]):g}; give one of {1 / LARGEST:g} to "
            f"{LARGEST:g}"
        )
    if batch.rewards is not None and (large := batch.rewards.abs() > LARGEST).any():
        row = int(large.int().argmax())
        raise InputError(
            f"the reward of response {row} is {float(batch.rewards[row]):g}; give a finite number within ±{LARGEST:g}"
        )
    for name in ("advantages", *LOGPROBS):
        _check_per_token(batch, name)


def _check_per_token(batch: TokenBatch, name: str) -> None:
    if (values := getattr(batch, name)) is None:
        return
    strange = values.abs() > LARGEST  # False for NaN
    wanted = f"give a finite number within ±{LARGEST:g}"
    if name != "advantages":
        strange |= values > ROUNDING
        wanted = "a log-probability is finite and at most 0 (natural logarithm; are these probabilities?)"
    if (strange := strange & batch.response_mask).any():
        row, column = strange.nonzero()[0].tolist()
        raise InputError(
            f"{name} is {float(values[row, column]):g} at position {int(batch.positions()[row, column])} of response "
            f"{row}; {wanted}"
        )
