"""Two steps of two prompts with three samples each, from which every writer makes what its trainer would have seen.

Among them one that was cut off, one that is empty, one with a tool's output between its tokens, and one that the
trainer takes no token of. All numbers are sums of few powers of two: float32 holds them exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

EOS = 2


@dataclass(frozen=True)
class Sample:
    """One response; lists have an entry per token of it."""

    prompt: list[int]
    response: list[int]
    reward: float
    sampler: list[float]
    """Log-probabilities of the engine that sampled, 0 where nobody did."""
    trainer: list[float]
    """The trainer's own, before the step."""
    mask: list[int]
    """1 where the policy sampled, 0 on a tool's output."""
    end: str = "stop"
    """Why it ended: stop, or length."""
    dropped: bool = False
    """Whether the trainer takes no token of it."""

    @property
    def entropy(self) -> list[float]:
        return [-2.0 * value for value in self.trainer]


def _sample(
    prompt: list[int], response: list[int], reward: float, *, tool: slice = slice(0, 0), **more: object
) -> Sample:
    length = len(response)
    tool_at = [*range(length)[tool]]
    sampler = [0.0 if at in tool_at else -0.25 * (1 + at) for at in range(length)]
    trainer = [value - 0.125 for value in sampler]
    return Sample(prompt, response, reward, sampler, trainer, [int(at not in tool_at) for at in range(length)], **more)


A, B, C, D = [4, 5, 6], [11, 12], [20, 21, 22, 23], [30, 31]
STEPS: list[list[list[Sample]]] = [
    [
        [_sample(A, [7, 8, EOS], 1.0), _sample(A, [9, 7, 8, 10], 0.0, end="length"), _sample(A, [], 0.0)],
        [
            _sample(B, [13, EOS], 1.0),
            _sample(B, [14, 50, 51, 52, 15, EOS], 0.5, tool=slice(1, 4)),
            _sample(B, [16, 17, EOS], 0.0, dropped=True),
        ],
    ],
    [
        [_sample(C, [24, EOS], 0.0), _sample(C, [25, 26, EOS], 1.0), _sample(C, [27, EOS], 1.0)],
        [_sample(D, [32, 33, 34, EOS], 2.0), _sample(D, [35, EOS], 0.0), _sample(D, [36, 37, EOS], 1.0)],
    ],
]
"""STEPS[step][prompt][sample]."""


def flat(step: int) -> list[Sample]:
    """The samples of a step, prompt after prompt."""
    return [sample for group in STEPS[step] for sample in group]


def words(ids: list[int]) -> str:
    """What the tests' tokenizer writes for ids, without its special tokens."""
    return " ".join(f"w{i}" for i in ids if i > 3)
