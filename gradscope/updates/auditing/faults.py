"""Common errors in computing a loss: what each does to the loss, in words, and how it is mended.

Faults of COLUMNS change what the weights are made of, faults of TERMS the weights and what denominators count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import exp
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.objective import KL, LossSettings, TokenWeights, batch_weights, fill_unknown, grpo_advantages
from gradscope.rollouts import TokenBatch


class Fault(NamedTuple):
    """An error, in words."""

    words: str
    """What the loss is then, after "the mean …, "; with {part} and {value}."""
    remedy: str
    """What to do."""


_ALIGN = "let logits, labels, mask and advantages of a token stand at one place: logits at s predict token s + 1"
_LATE = {
    by: f"each token with the weight of the token {word}before it" for by, word in enumerate(("", "two ", "three "), 1)
}
_MASK = "shift the mask as labels are: the mask at s + 1 is that of the token that logits at s predict"
_END = "look how labels are shifted and where the mask ends: it must keep every sampled token, EOS included"
_TURNS = "keep every sampled token: look at the mask of assistant turns"
_CUT = "give responses without an end token their whole length: argmax over (ids == end) is 0 for them"
_PAD = "pad with another token than the one that ends responses, or mask by length: ids != pad_token_id drops true ends"
_KL = "look at the sign and the coefficient of the KL term, and whether its gradient is detached"
_RATIO = "correct each token's KL by its own π/π_old, or not at all (TRL: use_bias_correction_kl=False)"
_STATS = "normalise rewards within their own groups, as the log says, before responses are shuffled or split"
_SHIFTED = "score it with the same shift as log π: log-probabilities at s − 1 belong to token s"
_MINIMUM = "take the minimum of ratio·Â and clip(ratio)·Â: a token may be cut only where Â has moved it beyond the clip"
_ORDER = "undo the sort of rows (by the inverse permutation) before what was computed in its order is used"
_ROWS = "keep a response's numbers in its row: look at shuffles, at gathers, and at repeat beside repeat_interleave"
_UNSEEN = "make the attention mask of lengths: ids != pad_token_id hides true ends of turns inside rows"
_FLOAT = "upcast the logits to float32 before log_softmax (and divide by the temperature after)"
_SLICES = "shift labels before rows are cut into slices for sequence-parallel ranks"
_LOST = "look for a part that is skipped: a micro-batch without zero_grad in time, a filter, no_sync, drop_last"

FAULTS: dict[str, Fault] = {
    "mask-late": Fault(_LATE[1], _ALIGN),
    "mask-early": Fault(_LATE[1].replace("before", "after"), _ALIGN),
    "mask-late-2": Fault(_LATE[2], _ALIGN),
    "mask-early-2": Fault(_LATE[2].replace("before", "after"), _ALIGN),
    "mask-late-3": Fault(_LATE[3], _ALIGN),
    "mask-early-3": Fault(_LATE[3].replace("before", "after"), _ALIGN),
    "mask-alone-late": Fault("with the mask one token late and all else in place", _MASK),
    "mask-alone-early": Fault("with the mask one token early and all else in place", _MASK),
    "no-temperature": Fault("with log π at temperature 1", "divide the logits by the sampling temperature"),
    "no-kl": Fault("without KL", _KL),
    "kl-sign": Fault("with the opposite sign of KL", _KL),
    "kl-k1": Fault("with KL by k1", "set the estimator of KL"),
    "kl-k2": Fault("with KL by k2", "set the estimator of KL"),
    "kl-k3": Fault("with KL by k3", "set the estimator of KL"),
    "kl-correction": Fault(
        "with KL times π/π_old where that is not meant, or the other way round",
        "correct KL in the trainer as meant (TRL: use_bias_correction_kl), or write log or suite with --kl-corrected",
    ),
    "kl-sequence-ratio": Fault("with KL times each response's geometric mean of π/π_old", _RATIO),
    "kl-sequence-ratio-detached": Fault(
        "with KL times each response's geometric mean of π/π_old, but not that ratio's gradient", _RATIO
    ),
    "kl-clamped": Fault("without KL where π < π_ref", "clamp no KL at 0: the clamped tokens have no gradient"),
    "kl-scaled": Fault(
        "with {value:.4g} times the KL", "look at the coefficient of KL, and whether it is applied twice"
    ),
    "kl-reversed": Fault("with π and π_ref swapped in KL", "KL's estimators take log π_ref − log π"),
    "kl-in-advantages": Fault(
        "with KL subtracted from the advantages, not in the loss", "take KL into the reward, or into the loss, as meant"
    ),
    "kl-unmasked": Fault("with KL also of the tokens that the mask drops", "multiply KL by the response mask, too"),
    "entropy-unmasked": Fault(
        "with the entropy also of the tokens that the mask drops", "multiply the entropy by the response mask, too"
    ),
    "ref-late": Fault("with log π_ref of the token before", _SHIFTED),
    "ref-early": Fault("with log π_ref of the token after", _SHIFTED),
    "ref-late-0": Fault("with log π_ref of the token before, and 0 at the first", _SHIFTED),
    "ref-early-0": Fault("with log π_ref of the token after, and 0 at the last", _SHIFTED),
    "ref-old": Fault("with π_old as the reference", "keep the reference's weights apart from the policy's"),
    "teacher-late": Fault("with the teacher's log-probability of the token before", _SHIFTED),
    "teacher-early": Fault("with the teacher's log-probability of the token after", _SHIFTED),
    "old-late": Fault("with log π_old of the token before", _SHIFTED),
    "old-early": Fault("with log π_old of the token after", _SHIFTED),
    "old-recomputed": Fault(
        "with π/π_old = 1 at every token", "keep the log-probabilities from before the first step on these responses"
    ),
    "old-bfloat16": Fault("with log π_old rounded to bfloat16", "keep log-probabilities in float32, also on their way"),
    "ref-bfloat16": Fault("with log π_ref rounded to bfloat16", "keep log-probabilities in float32, also on their way"),
    "no-clip": Fault("without clipping", "look whether ratios beyond the clips are cut, and with which thresholds"),
    "clip-high-ignored": Fault("with the lower clip's ratio as the upper one's, too", "pass both clip ratios"),
    "clips-swapped": Fault("with the lower and the upper clip's ratios swapped", "pass the clip ratios by name"),
    "clips-of-log": Fault("with log(π/π_old) clipped, not π/π_old", "clip the ratio: exp(clamp(log ratio)) is another"),
    "no-dual-clip": Fault("without the dual clip", "cut ratio·Â at c·Â where Â is negative"),
    "clip-alone": Fault("with the clipped ratio alone, without the minimum", _MINIMUM),
    "clip-maximum": Fault("with the maximum of ratio·Â and clip(ratio)·Â", _MINIMUM),
    "clip-ratios": Fault("with Â times the minimum of ratio and clip(ratio)", _MINIMUM),
    "clip-positive": Fault("without clipping where Â is negative", _MINIMUM),
    "sequence-ratio": Fault("with each response's geometric mean of π/π_old", "set the importance sampling to tokens"),
    "sequence-ratio-product": Fault("with each response's product of π/π_old", "take a root of the response's length"),
    "no-reweight": Fault("without Advantage Reweighting", "multiply advantages by α·π_old + 1 − α"),
    "advantages-rewards": Fault("with rewards as advantages", _STATS),
    "advantages-centred": Fault("with advantages not divided by the group's standard deviation", _STATS),
    "advantages-batch": Fault("with rewards normalised over the whole batch", _STATS),
    "advantages-batch-std": Fault("with advantages divided by the whole batch's standard deviation", _STATS),
    "advantages-regrouped": Fault("with rewards normalised over equally many consecutive responses", _STATS),
    "advantages-strided": Fault("with rewards normalised over responses a fixed stride apart", _STATS),
    "advantages-whitened": Fault("with advantages whitened over the batch's tokens", "whiten once, or not at all"),
    "not-detached": Fault(
        "with the gradient of the weights themselves", "detach the weight: weight.detach() · log π, or · the surrogate"
    ),
    "no-entropy": Fault("without the gradient of the entropy bonus", "compute the entropy outside torch.no_grad()"),
    "entropy": Fault("with an entropy bonus of {value:.3g}", "look at the coefficient of the entropy and its sign"),
    "last-token": Fault("without each response's last token (EOS)", _END),
    "last-token-uncounted": Fault("without each response's last token (EOS), in the denominators as well", _END),
    "end-token": Fault("without the end tokens, where responses have one", _PAD),
    "end-token-uncounted": Fault("without the end tokens, in the denominators as well", _PAD),
    "last-turn": Fault("with each response's last turn alone", _TURNS),
    "last-turn-uncounted": Fault("with each response's last turn alone, in the denominators as well", _TURNS),
    "first-turn": Fault("with each response's first turn alone", _TURNS),
    "first-turn-uncounted": Fault("with each response's first turn alone, in the denominators as well", _TURNS),
    "unended": Fault("without responses that have no end token", _CUT),
    "unended-uncounted": Fault("without responses that have no end token, in the denominators as well", _CUT),
    "unended-first": Fault("with the first token alone of responses that have no end token", _CUT),
    "first-token": Fault("without each response's first token", _END),
    "first-token-uncounted": Fault("without each response's first token, in the denominators as well", _END),
    "mask-advantages": Fault("with the advantages as its mask", "pass the response mask, not the advantages"),
    "mask-advantages-policy": Fault(
        "with the advantages as its mask but for KL and entropy", "pass the response mask, not the advantages"
    ),
    "mask-nonzero": Fault(
        "over tokens with an advantage alone", "count tokens by the response mask, not by advantages"
    ),
    "mask-ignored": Fault("also over the tokens between that the mask drops", "multiply by the response mask"),
    "prompt-trained": Fault("also over the prompt and all that the mask drops", "multiply by the response mask"),
    "masked-counted": Fault("with denominators that also count dropped tokens", "count tokens by the response mask"),
    "positive-zeroed": Fault("without tokens of positive weight", "look for a clamp at 0: it stops the gradient"),
    "negative-zeroed": Fault("without tokens of negative weight", "look for a clamp at 0: it stops the gradient"),
    "chunk-means": Fault(
        "as the mean of the means of chunks of {value:.0f} tokens", "add up the chunks' sums, and divide once"
    ),
    "pads-counted": Fault(
        "with denominators that count padding, to the longest response of each micro-batch", "count tokens by the mask"
    ),
    "rows-counted": Fault(
        "with denominators that count rows with padding, to the longest of each micro-batch", "count tokens by the mask"
    ),
    "slice-starts": Fault("without the first tokens of a row's {value:.0f} slices but the first", _SLICES),
    "slice-starts-uncounted": Fault(
        "without the first tokens of a row's {value:.0f} slices but the first, in the denominators as well", _SLICES
    ),
    "response-missing": Fault("without one of the responses, number {part}", _LOST),
    "micro-batch-missing": Fault("without one of the micro-batches, number {part}", _LOST),
    "process-missing": Fault("without one of the processes, number {part}", _LOST),
    "responses-missing": Fault(
        "without {value:.0f} responses from number {part} on, as of a micro-batch or rank", _LOST
    ),
}
"""Fault → words. See also BOUNDS."""

WHITENED = {
    "batch": "over the whole batch",
    "processes": "within each process",
    "micro-batches": "within each micro-batch",
    "parts": "within each of {value:.0f} parts of consecutive responses",
}
"""Where advantages may be whitened again, in words."""
for _place, _words in WHITENED.items():
    FAULTS[f"advantages-whitened-in-{_place}"] = Fault(
        f"with advantages shifted and scaled anew {_words}, as whitening them again does",
        "whiten once, over the tokens of the mask and the whole batch, or not at all",
    )
NEEDS = {
    "no-clip": "a ratio π/π_old beyond a clip",
    "old-recomputed": "log π_old unlike log π",
    "no-kl": "KL (log π_ref, and a coefficient)",
    "no-temperature": "a temperature other than 1",
    "mask-ignored": "dropped tokens between others",
    "advantages-centred": "rewards with advantages in units of their spread",
    "retokenised": "responses whose text is encoded to other ids",
}
"""A fault → what a batch must have to show it, and what else goes with it."""

_PACKED = "separate packed rows: a block-diagonal mask, or cu_seqlens and position_ids for an attention that reads them"
PACKED = {
    "packed": "{value:.0f} consecutive rows in one",
    "packed-bins": "consecutive rows in bins of {value:.0f} tokens",
}
"""Ways to pack rows, in words."""
for _name, _words in PACKED.items():
    FAULTS[_name] = Fault(f"with {_words}, each seeing those before it", _PACKED)
    FAULTS[f"{_name}-restarting"] = Fault(
        f"with {_words}, each seeing those before it, at positions that restart", _PACKED
    )
FAULTS["pads-seen"] = Fault(
    "with prompts padded on the left to the longest of {value:.0f} rows, and pads that are attended to",
    "pass attention_mask (and position_ids that do not count pads) to the model's forward pass",
)
RETOKENISED = {
    "retokenised": "decoded to text and encoded again",
    "retokenised-whole": "decoded to text with their prompts, and encoded again",
    "retokenised-stripped": "decoded to text without special tokens, and encoded again",
}
"""Ways to train on other ids than were sampled, in words."""
for _name, _words in RETOKENISED.items():
    FAULTS[_name] = Fault(
        f"with responses {_words}, which makes other ids of {{value:.0f}} of them",
        "train on the sampled ids: hand ids, not text, from the sampler to the trainer",
    )
THINKING = {
    f"thinking-dropped{prompt}{blank}": f"with the thinking of turns before the last left out{told}{also}"
    for prompt, told in (("", ""), ("-prompts", ", of prompts, too"))
    for blank, also in (("", ""), ("-blanks", ", with the blank lines after it"))
}
"""Ways to leave out thinking as chat templates do, in words."""
for _name, _words in THINKING.items():
    FAULTS[_name] = Fault(
        f"{_words}, from {{value:.0f}} responses",
        "train on the sampled ids: a chat template that renders the conversation again drops what was sampled",
    )
REWRITTEN = (*PACKED, *(f"{name}-restarting" for name in PACKED), "pads-seen", *RETOKENISED, *THINKING)
"""Faults by which rows are of other tokens, or see others: how many rows is the reading's value, or tokens of a bin."""
PASSES = {
    "head-bare": Fault(
        "with the logits of the output matrix alone, without what the model does to them",
        "do to the logits what the model's forward pass does: soft-capping (final_logit_softcapping), a scale",
    ),
    "head-unbiased": Fault("without the bias of the output matrix", "add the head's bias to the logits"),
    "window-ignored": Fault(
        "with attention to the whole row, beyond the model's sliding window",
        "cut the attention mask at the model's sliding window, in the layers that have one",
    ),
    "attention-uncapped": Fault(
        "without the soft-capping of attention scores",
        "use attention that applies attn_logit_softcapping; sdpa does not",
    ),
    "ends-unseen": Fault("with the tokens of id {value:.0f} hidden from attention", _UNSEEN),
    "ends-unseen-uncounted": Fault(
        "with the tokens of id {value:.0f} hidden from attention and not counted in positions", _UNSEEN
    ),
    "dropped-unseen": Fault(
        "with the tokens that the log's mask drops hidden from attention",
        "give the model the attention mask, and the loss alone the response mask",
    ),
    "positions-restarting": Fault(
        "with positions that restart at each response", "let a response's positions go on where its prompt's end"
    ),
    "adapter-scaled": Fault(
        "with the adapter at a scale of {value:.4g}", "scale the adapter by lora_alpha/r, or lora_alpha/√r with rsLoRA"
    ),
    "temperature-squared": Fault(
        "with logits divided by the temperature twice", "look where else logits are scaled, in the model or its head"
    ),
    "temperature-inverse": Fault("with logits times the temperature", "divide the logits by the temperature"),
    "prompts-detached": Fault(
        "without the gradient through the prompts' keys and values",
        "compute shared prompts with gradients: a cache of keys and values from under no_grad is a constant",
    ),
    "adapter-inputs-detached": Fault(
        "without the adapters' part of the gradient of their inputs",
        "return dy·W + s·dy·B·A as the gradient of a fused LoRA layer's input",
    ),
}
"""Passes that are not the model's own."""
FAULTS |= PASSES
HALF = ("bfloat16", "float16")
for _name in HALF:
    FAULTS[f"logits-{_name}"] = Fault(f"with log π of logits that are rounded to {_name}", _FLOAT)
    FAULTS[f"log-softmax-{_name}"] = Fault(f"with log_softmax in {_name}", _FLOAT)
    FAULTS[f"logprobs-{_name}"] = Fault(
        f"with log π that is rounded to {_name}", "keep log-probabilities in float32: look at buffers and casts"
    )

ORDERS = {
    "longest-first": Fault("of rows sorted by length, longest first", _ORDER),
    "shortest-first": Fault("of rows sorted by length, shortest first", _ORDER),
    "reversed": Fault("of rows in reverse order", _ROWS),
    "rolled": Fault("of the response {value:.0f} rows before", _ROWS),
    "interleaved": Fault("of rows dealt in turn, as if groups were interleaved", _ROWS),
    "blocked": Fault("of rows in blocks, as if interleaved groups were so", _ROWS),
}
"""Other orders of rows, of which a column may be."""
INNER = {
    "micro-batches": "within each micro-batch",
    "processes": "within each process",
    "prompts": "within each prompt's responses",
    "micro-batch": "within micro-batch {part} alone",
    "process": "within process {part} alone",
}
"""Where else rows may be in another order than the batch's, in words."""
for _column_name, _words in (("old", "log π_old"), ("ref", "log π_ref"), ("advantages", "the advantages")):
    for _name, _fault in ORDERS.items():
        FAULTS[f"{_column_name}-{_name}"] = Fault(f"with {_words} {_fault.words}", _fault.remedy)
        for _place, _where in INNER.items():
            _told = f"with {_words} {_fault.words}, {_where}"
            FAULTS[f"{_column_name}-{_name}-in-{_place}"] = Fault(_told, _fault.remedy)

BOUNDS = {
    "logprob": "log π",
    "ratio": "π/π_old",
    "kl-gap": "log π − log π_ref",
    "weight": "the weight",
    "position": "the position",
    "place": "the place in the row",
    "from-end": "the distance from the response's end",
    "length": "the response's length",
}
"""A column → words: beyond some value of it, tokens may have no gradient. log π is in nats; positions and lengths are
in kept tokens, from 0, and places in all real ones."""
for _name, _of in (("token", "all tokens"), ("sequence", "responses' means")):
    FAULTS[f"kl-{_name}-mean"] = Fault(f"with KL as the mean of {_of}", "average KL as the rest of the loss")
    FAULTS[f"entropy-{_name}-mean"] = Fault(
        f"with the entropy as the mean of {_of}", "average the entropy as the rest of the loss"
    )
for _name in ("micro-batches", "processes"):
    FAULTS[f"kl-{_name}"] = Fault(f"with KL as the mean of {_name}' means", "average KL as the rest of the loss")
    FAULTS[f"entropy-{_name}"] = Fault(
        f"with the entropy as the mean of {_name}' means", "average the entropy as the rest of the loss"
    )
for _name, _words in BOUNDS.items():
    for _side in ("above", "below"):
        FAULTS[f"{_name}-{_side}"] = Fault(
            f"without tokens where {_words} is {_side} {{value:.4g}}",
            "look for a clamp, a filter or a limit of length: what is clamped has no gradient",
        )


@dataclass(frozen=True)
class Columns:
    """What a loss's weights are made of."""

    batch: TokenBatch
    loss: LossSettings
    logprob: Float[Tensor, "B S"]
    """log π."""
    kept: Bool[Tensor, "B S"]
    """Tokens that the log's mask keeps."""
    eps: float = 1e-6
    """Added to a group's standard deviation where advantages are made of rewards."""
    kl_ratio: Literal["live", "detached"] | None = None
    """Whether KL is times each response's geometric mean of π/π_old, with that ratio's gradient or without."""
    kl_reversed: bool = False
    """Whether π and π_ref are swapped in k3."""

    def weigh(
        self, entropy: Float[Tensor, "B S"], logprob: Float[Tensor, "B S"] | None = None
    ) -> TokenWeights:
        """Return Eq. 2's weights; logprob: in place of log π."""
        batch = self.batch
        if self.loss.weighting is not None:  # whose sums and thresholds are over the kept tokens
            batch = replace(batch, response_mask=self.kept)
        settings = {"num_tokens": batch.num_tokens, "entropy": entropy}
        return batch_weights(self.logprob if logprob is None else logprob, batch, self.loss, **settings)

    def pull(self, kl: Float[Tensor, "B S"]) -> Float[Tensor, "B S"]:
        """Return KL's weights reversed, or times the response's ratio, if that is so; kl: neither."""
        if self.kl_reversed:  # d(π/π_ref − 1 − log(π/π_ref))/d log π
            ratio = (self.logprob - self.batch.ref_logprobs).exp().nan_to_num(1.0)
            return torch.where(self.kept, self.loss.kl_coef * (1 - ratio), 0.0)
        if self.kl_ratio is None or self.batch.ref_logprobs is None:
            return kl
        if self.kl_ratio == "live":  # d(s·k_t) = s·dk_t + k_t·ds, and ds/d log π_u = s/|o| for every token u
            value = KL[self.loss.kl_estimator](self.logprob, self.batch.ref_logprobs).nan_to_num(0.0)
            kl = kl - torch.where(self.kept, self.loss.kl_coef * self.average(value), 0.0)
        return kl * self.average(self.logprob - fill_unknown(self.batch.old_logprobs, self.logprob)).exp()

    def average(self, values: Float[Tensor, "B S"]) -> Float[Tensor, "B 1"]:
        """Return the mean over each response's kept tokens."""
        return torch.where(self.kept, values, 0.0).sum(1, keepdim=True) / self.kept.sum(1, keepdim=True).clamp(min=1)

    def with_advantages(self, advantages: Tensor) -> Columns:
        """Replace the advantages, by token or by response."""
        own = advantages if advantages.dim() == 2 else advantages[:, None].expand(self.logprob.shape)
        return replace(self, batch=replace(self.batch, advantages=own.to(self.batch.advantages)))

    def shift(self, values: Float[Tensor, "B S"], by: int, fill: float) -> Float[Tensor, "B S"]:
        """Give each kept token the value of the column `by` before it, if that is kept, or `fill`."""
        moved = values.roll(by, 1)
        return torch.where(self.kept.roll(by, 1) & self.kept, moved, fill)


@dataclass(frozen=True)
class Terms:
    """The terms of a loss, by token [K], before averaging; in float64."""

    parts: Float[Tensor, "3 K"]
    """Weights on ∇ log π of policy and KL, and on ∇H: of every token, kept or not."""
    mask: Float[Tensor, "3 K"]
    """Factors on the parts."""
    counted: Float[Tensor, "3 K"]
    """What denominators count."""
    advantages: Float[Tensor, " K"]
    response: Int[Tensor, " K"]
    kept: Bool[Tensor, " K"]
    """Tokens that the log's mask keeps."""
    inside: Bool[Tensor, " K"]
    """Tokens of a response, kept or not."""
    end: Bool[Tensor, " K"]
    """Kept tokens with the id that ends responses."""

    def shift(self, by: int) -> Terms:
        """Give each kept token the terms of the kept token `by` before it, in its response, or 0."""
        values, response = (self.parts * self.mask)[:, self.kept], self.response[self.kept]
        rows = torch.arange(len(response))
        source = (rows - by).clamp(0, len(rows) - 1)
        moved = (source == rows - by) & (response[source] == response)
        parts = torch.zeros_like(self.parts)
        parts[:, self.kept] = torch.where(moved, values[:, source], 0.0)
        return replace(self, parts=parts, mask=torch.ones_like(self.mask))

    def move_mask(self, by: int, among: Bool[Tensor, " K"]) -> Terms | None:
        """Take the terms of tokens, among these, of which the one `by` before is kept, as denominators do; None: the
        log's mask keeps all of them."""
        response = self.response[among]
        rows = torch.arange(len(response))
        source = (rows - by).clamp(0, len(rows) - 1)
        moved = torch.zeros_like(self.kept)
        moved[among] = self.kept[among][source] & (source == rows - by) & (response[source] == response)
        return self.over(moved) if (moved & ~self.kept).any() else None

    def ends(self, which: str) -> Bool[Tensor, " K"]:
        """Return which tokens are the first, or the last, that are kept of their response."""
        response = self.response[self.kept]
        change, edge = response[1:] != response[:-1], torch.ones(1, dtype=torch.bool)
        found = torch.zeros_like(self.kept)
        found[self.kept] = torch.cat([edge, change] if which == "first" else [change, edge])
        return found

    def scale(self, *factors: float) -> Terms:
        """Multiply policy, KL and entropy."""
        return replace(self, parts=self.parts * torch.tensor(factors, dtype=torch.float64)[:, None])

    def over(self, tokens: Bool[Tensor, " K"], *, counted: bool = True) -> Terms:
        """Take the terms of these tokens alone; counted: by denominators, too."""
        own = tokens.double().expand(self.mask.shape)
        return replace(self, mask=own, counted=own if counted else self.counted)

    def of_turn(self, which: str, *, counted: bool = True) -> Terms | None:
        """Take the terms of each response's first, or last, run of kept tokens; None: these are all."""
        starts = self.kept & ~(self.kept.roll(1) & (self.response.roll(1) == self.response))
        if len(starts):
            starts[0] = self.kept[0]
        turn = starts.cumsum(0)
        edge = torch.full((int(self.response.max()) + 1,), 0).scatter_reduce(
            0, self.response[self.kept], turn[self.kept], "amin" if which == "first" else "amax", include_self=False
        )
        own = self.kept & (turn == edge[self.response])
        return self.over(own, counted=counted) if (self.kept & ~own).any() else None

    def of_ended(self, also: Bool[Tensor, " K"] | None = None, *, counted: bool = True) -> Terms | None:
        """Take the kept terms of responses that have an end token, and those of other tokens; None: these are all."""
        ended = torch.isin(self.response, self.response[self.end])
        own = self.kept & (ended if also is None else ended | also)
        return self.over(own, counted=counted) if self.end.any() and (self.kept & ~own).any() else None

    def without(self, tokens: Bool[Tensor, " K"]) -> Terms:
        """Leave out some tokens' terms."""
        return replace(self, mask=self.mask * ~tokens)


def _set(c: Columns, **changes: Any) -> Columns:
    """Change settings of the loss."""
    return replace(c, loss=replace(c.loss, **changes))


def _column(name: str, by: int, fill: float) -> Callable[[Columns], Columns | None]:
    def change(c: Columns) -> Columns | None:
        values, of_kl = getattr(c.batch, name), name == "ref_logprobs" and not c.loss.is_whole
        if values is None or (of_kl and not c.loss.kl_coef):
            return None
        ends = 0.0 if name == "ref_logprobs" and not of_kl else fill  # a margin needs every token's
        return replace(c, batch=replace(c.batch, **{name: c.shift(values, by, ends)}))

    return change


def _teacher(by: int) -> Callable[[Columns], Columns | None]:
    """Shift log ν: of a distillation or, without its column, in advantages of log ν − log π."""

    def change(c: Columns) -> Columns | None:
        if c.batch.teacher_logprobs is not None:
            return _column("teacher_logprobs", by, torch.nan)(c)
        own = fill_unknown(c.batch.old_logprobs, c.logprob)
        if not _varies(c):
            return None
        moved = c.shift(c.batch.advantages + own, by, torch.nan)
        return c.with_advantages(torch.where(moved.isnan(), 0.0, moved - own))

    return change


def _varies(c: Columns) -> bool:
    """Return whether advantages differ within responses."""
    if c.batch.advantages is None:
        return False
    low, high = (torch.where(c.kept, c.batch.advantages, -sign * torch.inf) for sign in (1, -1))
    return bool((low.amax(1) > high.amin(1))[c.kept.any(1)].any())


def _of_rewards(advantages: Callable[[Tensor, Tensor, float], Tensor | None]) -> Callable[[Columns], Columns | None]:
    """Make advantages of rewards [B], group ids [B] and eps."""

    def change(c: Columns) -> Columns | None:
        if c.batch.rewards is None or c.batch.advantages is None or not c.batch.rewards.isfinite().all():
            return None
        made = advantages(c.batch.rewards.double(), c.batch.group_ids, c.eps)
        return None if made is None else c.with_advantages(made)

    return change


def _centre(rewards: Tensor, groups: Tensor, _: float = 0.0) -> Tensor:
    _, own = groups.unique(return_inverse=True)
    return rewards - (torch.zeros(int(own.max()) + 1).double().index_add_(0, own, rewards) / own.bincount())[own]


def _regroup(rewards: Tensor, groups: Tensor, eps: float, *, strided: bool) -> Tensor | None:
    sizes = groups.unique(return_counts=True)[1]
    if len(sizes.unique()) > 1 or len(sizes) == 1:
        return None
    place = torch.arange(len(rewards))
    return grpo_advantages(rewards, place % len(sizes) if strided else place // int(sizes[0]), eps=eps)


def _whiten(c: Columns) -> Columns | None:
    if c.batch.advantages is None:
        return None
    own = c.batch.advantages[c.kept].double()
    return c.with_advantages((c.batch.advantages - own.mean()) / (own.std() + 1e-8))


def _average_ratio(c: Columns, *, whole: bool = False) -> Columns | None:
    if c.batch.old_logprobs is None:
        return None
    mean = c.average(c.logprob - fill_unknown(c.batch.old_logprobs, c.logprob))
    mean = mean * c.kept.sum(1, keepdim=True) if whole else mean
    return replace(c, batch=replace(c.batch, old_logprobs=(c.logprob - mean).to(c.batch.old_logprobs)))


def _multiply_kl(c: Columns, how: Literal["live", "detached"]) -> Columns | None:
    return replace(_set(c, kl_corrected=False), kl_ratio=how) if _pulls(c) else None


def _reclip(cut: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Columns], Columns | None]:
    """Cut other tokens than PPO's clip does; cut: from where π/π_old is below and above its range, and where Â > 0."""

    def change(c: Columns) -> Columns | None:
        if c.batch.old_logprobs is None or c.batch.advantages is None or c.loss.weighting is not None:
            return None
        ratio = (c.logprob - fill_unknown(c.batch.old_logprobs, c.logprob)).exp()
        below, above = ratio < 1 - c.loss.clip_ratio_low, ratio > 1 + c.loss.clip_ratio_high
        gone = cut(below, above, c.batch.advantages > 0)
        return _unclip(c).with_advantages(c.batch.advantages.masked_fill(gone, 0.0))

    return change


def _clip_between(clips: Callable[[float, float], tuple[float, float]]) -> Callable[[Columns], Columns | None]:
    """Make other clip ratios of the lower and the upper one."""

    def change(c: Columns) -> Columns | None:
        if c.loss.clip_ratio_high > 1:  # no clip, or one that has no like below
            return None
        low, high = clips(c.loss.clip_ratio_low, c.loss.clip_ratio_high)
        return _set(c, clip_ratio_low=low, clip_ratio_high=high)

    return change


def _unclip(c: Columns) -> Columns:
    return _set(c, clip_ratio_low=1.0, clip_ratio_high=1e30, clip_ratio_c=None)


def _reverse_kl(c: Columns) -> Columns | None:
    return replace(c, kl_reversed=True) if _pulls(c) and c.loss.kl_estimator == "k3" else None


def _into_advantages(c: Columns) -> Columns | None:
    if not _pulls(c) or c.batch.advantages is None:
        return None
    gap = fill_unknown(c.batch.old_logprobs, c.logprob) - c.batch.ref_logprobs
    penalty = torch.where(c.kept, c.loss.kl_coef * gap, 0.0).nan_to_num(0.0)
    return _set(c, kl_coef=0.0).with_advantages(c.batch.advantages - penalty)


def _round(c: Columns, column: str, dtype: torch.dtype) -> Columns | None:
    values = getattr(c.batch, column)
    if values is None or (column == "ref_logprobs" and not _pulls(c)):
        return None
    return replace(c, batch=replace(c.batch, **{column: values.to(dtype).to(values.dtype)}))


def _clamp_kl(c: Columns) -> Columns | None:
    if not _pulls(c):
        return None
    ref = c.batch.ref_logprobs
    return replace(c, batch=replace(c.batch, ref_logprobs=ref.masked_fill(c.logprob < ref, torch.nan)))


COLUMNS: dict[str, Callable[[Columns], Columns | None]] = {
    "old-recomputed": lambda c: (
        None if c.batch.old_logprobs is None else replace(c, batch=replace(c.batch, old_logprobs=None))
    ),
    "no-clip": _unclip,
    "clip-high-ignored": lambda c: _set(c, clip_ratio_high=c.loss.clip_ratio_low),
    "clips-swapped": _clip_between(lambda low, high: (high, low)),
    "clips-of-log": _clip_between(lambda low, high: (1 - exp(-low), exp(high) - 1)),
    "no-dual-clip": lambda c: None if c.loss.clip_ratio_c is None else _set(c, clip_ratio_c=None),
    "clip-alone": _reclip(lambda below, above, _: below | above),
    "clip-maximum": _reclip(lambda below, above, positive: torch.where(positive, below, above)),
    "clip-ratios": _reclip(lambda _, above, __: above),
    "clip-positive": _reclip(lambda _, above, positive: above & positive),
    "sequence-ratio": _average_ratio,
    "sequence-ratio-product": partial(_average_ratio, whole=True),
    "no-reweight": lambda c: None if c.loss.reweight_alpha is None else _set(c, reweight_alpha=None),
    **{f"kl-{k}": partial(lambda k, c: _set(c, kl_estimator=k) if _pulls(c) else None, k) for k in ("k1", "k2", "k3")},
    "kl-correction": lambda c: _set(c, kl_corrected=not c.loss.kl_corrected) if _pulls(c) else None,
    "kl-sequence-ratio": lambda c: _multiply_kl(c, "live"),
    "kl-sequence-ratio-detached": lambda c: _multiply_kl(c, "detached"),
    "kl-clamped": _clamp_kl,
    "kl-reversed": _reverse_kl,
    "kl-in-advantages": _into_advantages,
    "old-bfloat16": partial(_round, column="old_logprobs", dtype=torch.bfloat16),
    "ref-bfloat16": partial(_round, column="ref_logprobs", dtype=torch.bfloat16),
    **{
        f"{column}-{side}{end}": _column(f"{column}_logprobs", by, fill)
        for column, ends in (("old", {"": torch.nan}), ("ref", {"": torch.nan, "-0": 0.0}))
        for side, by in (("late", 1), ("early", -1))
        for end, fill in ends.items()
    },
    "ref-old": lambda c: (
        None
        if c.batch.old_logprobs is None or not _pulls(c)
        else replace(c, batch=replace(c.batch, ref_logprobs=c.batch.old_logprobs))
    ),
    "teacher-late": _teacher(1),
    "teacher-early": _teacher(-1),
    "advantages-rewards": _of_rewards(lambda rewards, *_: rewards),
    "advantages-centred": _of_rewards(_centre),
    "advantages-batch": _of_rewards(lambda rewards, _, eps: (rewards - rewards.mean()) / (rewards.std() + eps)),
    "advantages-batch-std": _of_rewards(lambda rewards, groups, eps: _centre(rewards, groups) / (rewards.std() + eps)),
    "advantages-regrouped": _of_rewards(partial(_regroup, strided=False)),
    "advantages-strided": _of_rewards(partial(_regroup, strided=True)),
    "advantages-whitened": _whiten,
}
"""None: it does not apply."""


def _pulls(c: Columns) -> bool:
    return bool(c.loss.kl_coef) and not c.loss.is_whole and c.batch.ref_logprobs is not None


SHIFTS = {("mask-late" if by > 0 else "mask-early") + f"-{abs(by)}" * (abs(by) > 1): by for by in (1, -1, 2, -2, 3, -3)}
"""By how many tokens a mask is late; negative: early."""


def _as_mask(parts: slice, terms: Terms) -> Terms | None:
    """Multiply these parts by the advantages, also what denominators count of them."""
    if parts.stop and not terms.parts[1:].any():
        return None
    mask, counted = terms.mask.clone(), terms.counted.clone()
    mask[parts] *= terms.advantages
    counted[parts] *= terms.advantages
    return replace(terms, mask=mask, counted=counted)


TERMS: dict[str, Callable[[Terms], Terms | None]] = {
    **{name: partial(lambda by, terms: terms.shift(by), by) for name, by in SHIFTS.items()},
    "no-kl": lambda terms: terms.scale(1, 0, 1),
    "kl-sign": lambda terms: terms.scale(1, -1, 1),
    "no-entropy": lambda terms: terms.scale(1, 1, 0),
    **{
        f"{which}-token{end}": partial(
            lambda which, counted, t: t.over(t.kept & ~t.ends(which), counted=counted), which, bool(end)
        )
        for which in ("last", "first")
        for end in ("", "-uncounted")
    },
    "end-token": lambda terms: terms.over(terms.kept & ~terms.end, counted=False) if terms.end.any() else None,
    "end-token-uncounted": lambda terms: terms.over(terms.kept & ~terms.end) if terms.end.any() else None,
    **{
        f"{which}-turn{end}": partial(lambda which, counted, t: t.of_turn(which, counted=counted), which, bool(end))
        for which in ("last", "first")
        for end in ("", "-uncounted")
    },
    "unended": lambda terms: terms.of_ended(counted=False),
    "unended-uncounted": lambda terms: terms.of_ended(),
    "unended-first": lambda terms: terms.of_ended(also=terms.ends("first")),
    "mask-advantages": partial(_as_mask, slice(None)),
    "mask-advantages-policy": partial(_as_mask, slice(1)),
    "mask-nonzero": lambda terms: terms.over(terms.kept & (terms.advantages != 0)),
    "mask-ignored": lambda terms: terms.over(terms.inside),
    "prompt-trained": lambda terms: terms.over(torch.ones_like(terms.kept)),
    "masked-counted": lambda terms: replace(terms, counted=terms.inside.double().expand(terms.counted.shape)),
    "positive-zeroed": lambda terms: terms.without(terms.parts[:2].sum(0) > 0),
    "negative-zeroed": lambda terms: terms.without(terms.parts[:2].sum(0) < 0),
}
"""None: it does not apply."""


def bounded(columns: Columns, terms: Terms, places: Bool[Tensor, "B S"]) -> Iterator[tuple[str, Float[Tensor, " K"]]]:
    """Yield the columns of BOUNDS [K] that are known, NaN where not; places: the tokens, in order."""
    batch, kept = columns.batch, columns.kept
    place, length = kept.cumsum(1) - 1, kept.sum(1, keepdim=True).expand(kept.shape)
    yield "logprob", columns.logprob[places].double()
    if batch.old_logprobs is not None:
        yield "ratio", (columns.logprob - batch.old_logprobs)[places].double().exp()
    if batch.ref_logprobs is not None:
        yield "kl-gap", (columns.logprob - batch.ref_logprobs)[places].double()
    yield "weight", terms.parts[:2].sum(0)
    yield "position", place[places].double()
    yield "place", (batch.attention_mask.cumsum(1) - 1)[places].double()
    yield "from-end", (length - 1 - place)[places].double()
    yield "length", length[places].double()


def orders(
    total: Int[Tensor, " B"], length: Int[Tensor, " B"], groups: Int[Tensor, " B"]
) -> Iterator[tuple[str, int | None, Int[Tensor, " B"]]]:
    """Yield each of ORDERS, in some ways, its number, and of which row each row then is.

    total, length: tokens of prompt and response, and of the response.
    """
    rows, sizes = torch.arange(len(total)), groups.unique(return_counts=True)[1]
    for own in (total, length):
        for name, sign in (("longest-first", -1), ("shortest-first", 1)):
            for order in ((sign * own).argsort(stable=True), (-sign * own).argsort(stable=True).flip(0)):
                yield from ((name, None, order), (name, None, order.argsort()))  # not put back, or put there twice
    yield "reversed", None, rows.flip(0)
    yield from (("rolled", by, rows.roll(by)) for by in (1, len(rows) - 1))
    if len(sizes) > 1 and len(sizes.unique()) == 1:
        yield "interleaved", None, rows.view(len(sizes), -1).T.flatten()
        yield "blocked", None, rows.view(-1, len(sizes)).T.flatten()


def inner_orders(
    part: Int[Tensor, " B"], total: Int[Tensor, " B"], length: Int[Tensor, " B"], groups: Int[Tensor, " B"]
) -> Iterator[tuple[str, int | None, Int[Tensor, " B"]]]:
    """Yield each of `orders` within all parts of a batch at once; where a part has not that order, its rows stay."""
    found: dict[tuple[str, int | None, int], Tensor] = {}
    for one in part.unique():
        rows = (part == one).nonzero()[:, 0]
        seen: Counter[tuple[str, int | None]] = Counter()
        for name, by, order in orders(total[rows], length[rows], groups[rows]):
            seen[name, by] += 1
            found.setdefault((name, by, seen[name, by]), torch.arange(len(part)))[rows] = rows[order]
    yield from ((name, by, order) for (name, by, _), order in found.items())
