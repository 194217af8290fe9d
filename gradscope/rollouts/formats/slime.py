"""Debug logs of slime and miles, saved by torch: rollout data and train data, joined if both are present.

Rollout data: {rollout_id, samples: [{group_index, index, tokens, response_length, reward, loss_mask,
rollout_log_probs, status, remove_sample, …}]}; train data: {rollout_id, samples: [{sample_index, tokens, loss_masks,
log_probs, ref_log_probs, advantages, entropy, …}]}, or, in miles, a file per rank {rollout_id, rank, rollout_data:
{tokens, response_lengths, loss_masks, sample_indices, log_probs, …}}, a list per column. All but tokens covers only the
response. The file's rollout_id is the training step; an evaluation has the rollout_id of the step before it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradscope.errors import InputError, first_line, show
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import (
    EMPTY,
    EVALUATED,
    IMAGES,
    ROUTED,
    Column,
    Format,
    Row,
    optional,
    whole_number,
)
from gradscope.rollouts.formats.columns import read_row
from gradscope.rollouts.group_rewards import group_moments
from gradscope.runs import Inert, load_tensors

UNTRAINED = "they have no train data, though other samples do"
TWICE = "another rank's train data has the same sample"
STAGE = "their rank computed neither log-probabilities nor advantages (an earlier pipeline stage)"
REMOVED = "the trainer removed them (`remove_sample`): none of their tokens is in its loss"
UNSCORED = "they were aborted or failed before they had a reward"
UNFINISHED = (
    "they were aborted or failed, but have a reward or an advantage: they count, as in a trainer that keeps them "
    "(slime samples aborted ones again)"
)
NUCLEUS = "the trainer renormalised π over the sampler's top-p tokens; here it is over the whole vocabulary"
STALE = "some of their tokens were sampled with older weights than others of the step"
AS_ONE = (
    "their rewards are scaled over all samples of the step: slime's own rule if prompts have unequal numbers of "
    "samples, or one rollout gave several"
)
SIBLING = "their rewards count in the group's mean through another sample of the same rollout, as in miles"
SINGULAR = {"response_lengths": "response_length", "loss_masks": "loss_mask", "sample_indices": "sample_index"}
"""List columns of train data → their names for a single sample."""

IN_SAMPLES = frozenset(
    (
        *("group_index", "index", "tokens", "response", "response_length", "reward", "loss_mask", "rollout_log_probs"),
        *("status", "remove_sample", "weight_versions", "rollout_top_p_token_offsets"),
        *("sample_index", "rollout_position", "log_probs", "ref_log_probs", "advantages", "execution"),
    )
)
"""Entries read from a sample in a file of tensors; others (experts, images, caches) can be 1,000 times larger."""
Key = tuple[int | None, int | None, int, int]


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    trained, sampled, evaluated, bare = [], {}, [], []
    for record, key in _keyed(records):
        if _is_evaluation(record):
            evaluated.append(record)
        elif "log_probs" in record.columns or "advantages" in record.columns:
            trained.append((record, key))
        elif "rank" in record.columns:
            bare.append(record)
        else:
            sampled[key] = record
    _check_tokens(trained, sampled)
    chosen, joined, left_out = [], set(), []
    for record, key in trained:
        if key in joined:
            left_out.append(Row(record.place, {}, key[0], left_out=TWICE))
        else:
            # Of both, the train data's columns, and those found only in the rollout data.
            others = sampled[key].columns if key in sampled else {}
            chosen.append(replace(record, columns=others | record.columns))
        joined.add(key)
    if trained:
        _place_rewards(chosen)
        unmatched = [(record, key[0]) for key, record in sampled.items() if key not in joined]
        left_out += [Row(record.place, {}, step, left_out=UNTRAINED) for record, step in unmatched]
    else:
        chosen = [*sampled.values()]
    for reason, records in ((STAGE, bare), (EVALUATED, evaluated)):
        left_out += [Row(r.place, {}, whole_number(r, "rollout_id"), left_out=reason) for r in records]
    own = [_row(record) for record in chosen]
    if not trained:
        own = _scale_as_trained(own, chosen)
    yield from _mark_stale(own, chosen)
    yield from left_out


def _keyed(records: Iterable[Record]) -> Iterator[tuple[Record, Key]]:
    """Yield each record with its sample's key: step, index, hash of the tokens, and a counter among equal ones.

    One rollout may give several samples with the same index but different tokens.
    """
    seen: Counter[object] = Counter()
    for record in records:
        if (whole_number(record, "cp_size") or 1) > 1:
            raise InputError(
                f"{record.place}: the file holds one of {record.columns['cp_size']} parts of each sequence (context "
                "parallelism); give only the rollout data, or dump with a context-parallel size of 1"
            )
        index = whole_number(record, "index" if "index" in record.columns else "sample_index")
        key = whole_number(record, "rollout_id"), index, hash(tuple(_tokens(record)))
        yield record, (*key, seen[(record.path, key)])
        seen[(record.path, key)] += 1


def _is_evaluation(record: Record) -> bool:
    """Return whether the file or folder name marks an evaluation: eval_ before the id."""
    step = record.columns.get("rollout_id")
    for part in (record.path.stem, *record.path.parent.parts[:-3:-1]):
        if step is not None and re.search(rf"(?<![0-9]){step}(?![0-9])", part):
            return f"eval_{step}" in part
    return False


def _check_tokens(trained: list[tuple[Record, Key]], sampled: dict[Key, Record]) -> None:
    """Raise InputError if train data and rollout data have different tokens for the same index."""
    tokens: dict[object, set[int]] = {}
    for step, index, own, _ in sampled:
        tokens.setdefault((step, index), set()).add(own)
    for record, (step, index, own, _) in trained:
        if index is not None and own not in tokens.get((step, index), {own}):
            other = next(r for key, r in sampled.items() if key[:2] == (step, index))
            raise InputError(
                f"{record.place}: `tokens` differ from those of {other.place}, which has the same index; give "
                "logs of a single run"
            )


def _place_rewards(trained: list[Record]) -> None:
    """Take rewards that are missing without rollout data from the train data's `raw_reward` of the whole batch.

    It is in the order of the rollout data: slime records each sample's position; miles sorts samples by index, and
    samples of one rollout share a reward.
    """
    steps: dict[int | None, list[Record]] = {}
    for record in trained:
        steps.setdefault(whole_number(record, "rollout_id"), []).append(record)
    for own in steps.values():
        name = "rollout_position" if "rollout_position" in own[0].columns else "sample_index"
        order = [whole_number(record, name) for record in own]
        rewards = own[0].columns.get("raw_reward")
        if isinstance(rewards, list) and len(rewards) == len(own) and None not in order:
            for reward, place in zip(rewards, sorted(range(len(own)), key=order.__getitem__), strict=True):
                own[place].columns.setdefault("reward", reward)


def _row(record: Record) -> Row:
    tokens, length = _tokens(record), _response_length(record)
    if not 0 <= length <= len(tokens):
        raise InputError(f"{record.place}: `tokens` is {show(tokens)}, but the response's length is {length}")
    start = len(tokens) - length
    ids = {"prompt_ids": tokens[:start], "response_ids": tokens[start:]}
    row = read_row(SLIME, replace(record, columns=record.columns | ids))
    row = replace(row, labels={**row.labels, **dict.fromkeys(ids, "tokens")})
    removed = record.columns.get("remove_sample") is True
    reasons = {EMPTY: length == 0, IMAGES: record.columns.get("has_images"), REMOVED: removed}
    if (reason := next((reason for reason, holds in reasons.items() if holds), None)) is not None:
        scored = {name: row.columns[name] for name in ("reward", "group") if name in row.columns}
        return replace(row, columns=scored, left_out=reason)
    unfinished = record.columns.get("status") in ("aborted", "failed", "pending")
    if unfinished and not {"advantage", "reward"} & row.columns.keys():
        return replace(row, columns={}, left_out=UNSCORED)
    said = {NUCLEUS: "rollout_top_p_token_offsets" in record.columns, ROUTED: record.columns.get("is_routed")}
    said[UNFINISHED] = unfinished
    return replace(row, remarks=tuple(remark for remark, holds in said.items() if holds))


def _scale_as_trained(rows: list[Row], records: list[Record]) -> list[Row]:
    """Scale rewards as the trainer did when it did not group them by prompt.

    slime forms groups of n consecutive samples if there are prompts × n samples, otherwise a single group of the whole
    step. miles counts one reward per rollout, however many samples it gave.
    """
    out = [*rows]
    by_step: dict[int | None, list[int]] = {}
    for at, row in enumerate(rows):
        if {"reward", "group"} <= row.columns.keys():
            by_step.setdefault(row.step, []).append(at)
    for places in by_step.values():
        executions = [(rows[at].columns["group"], records[at].columns.get("execution")) for at in places]
        first = {one: at for at, one in reversed([*zip(places, executions, strict=True)]) if one[1] is not None}
        again = [at for at, one in zip(places, executions, strict=True) if first.get(one, at) != at]
        if "metadata" in records[places[0]].columns:
            for at in again:
                out[at] = replace(out[at], is_counted=False, remarks=(*out[at].remarks, SIBLING))
            continue
        rewards = [rows[at].columns["reward"] for at in places]
        uneven = len({*Counter(str(rows[at].columns["group"]) for at in places).values()}) > 1
        if (uneven or again) and all(isinstance(reward, int | float) for reward in rewards):
            one_group = torch.zeros(len(rewards), dtype=torch.long)
            mean, std = (float(moment[0]) for moment in group_moments(torch.tensor([*map(float, rewards)]), one_group))
            scale = {"group_reward_mean": mean, "group_reward_std": std}
            for at in places:
                out[at] = replace(out[at], columns=out[at].columns | scale, remarks=(*out[at].remarks, AS_ONE))
    return out


def _mark_stale(rows: list[Row], records: list[Record]) -> Iterator[Row]:
    """Yield the rows, with a remark on those with tokens sampled by weights older than the step's newest."""
    given = [record.columns.get("weight_versions") for record in records]
    texts = [[*map(str, own)] if isinstance(own, list) else [] for own in given]
    versions = [[int(text) for text in own if text.isdecimal() and len(text) < 20] for own in texts]
    newest: dict[int | None, int] = {}
    for row, own in zip(rows, versions, strict=True):
        newest[row.step] = max([newest.get(row.step, 0), *own])
    for row, own in zip(rows, versions, strict=True):
        stale = own and min(own) < newest[row.step]
        yield replace(row, remarks=(*row.remarks, STALE)) if stale else row


def _tokens(record: Record) -> list[int]:
    tokens = record.columns.get("tokens")
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise InputError(f"{record.place}: `tokens` is {show(tokens)}; give a list of whole numbers")
    return tokens


def _response_length(record: Record) -> int:
    length = whole_number(record, "response_length")
    if length is not None:
        return length
    for name in ("log_probs", "advantages", "rollout_log_probs", "loss_mask"):
        if isinstance(record.columns.get(name), list):
            return len(record.columns[name])
    raise InputError(f"{record.place}: neither `response_length` nor `log_probs` says where the response starts")


def _read_samples(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the samples of a file saved by torch, without executing anything in it."""
    content = load_tensors(path, inert=True)
    samples = content.get("samples", _split_columns(content)) if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        found = show([*content]) if isinstance(content, dict) else type(content).__name__
        raise InputError(
            f"{path} has no list `samples` but {found}; give debug rollout or train data of slime or miles"
        )
    # The rewards of the whole batch: slime's are next to the samples, miles's among each rank's columns.
    content = {"raw_reward": _columns_of(content).get("raw_reward")} | content
    told = ("rollout_id", "rank", "cp_size", "metadata", "raw_reward")
    shared = {name: _numbers(f"{path}", name, content.get(name)) for name in told}
    for index, sample in enumerate(samples):
        place = f"{path}, sample {index}"
        # A sample's rollout_id is that of its execution; the file's is the step.
        own = {"execution": sample.get("rollout_id", sample.get("rollout_ids"))}
        own |= {SINGULAR.get(n, n): v for n, v in sample.items() if isinstance(n, str)}
        own = {name: _numbers(place, name, v) for name, v in own.items() if name in IN_SAMPLES}
        own["is_routed"] = None if sample.get("rollout_routed_experts") is None else True
        shown = [sample.get(name) for name in ("multimodal_inputs", "multimodal_train_inputs")]
        own["has_images"] = True if any(map(_is_something, shown)) else None
        yield place, shared | {name: v for name, v in own.items() if v is not None}


def _split_columns(content: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Split train data with a list per column into samples, using the columns with an entry for each."""
    data = _columns_of(content)
    tokens = data.get("tokens")
    if not isinstance(tokens, list):
        return None
    lists = {name: [*v] if isinstance(v, torch.Tensor) and v.dim() else v for name, v in data.items()}
    lists = {name: v for name, v in lists.items() if isinstance(v, list) and len(v) == len(tokens)}
    return [{name: values[index] for name, values in lists.items()} for index in range(len(tokens))]


def _is_something(value: Any) -> bool:
    """Return whether a value is neither None nor empty, nor a dictionary of only such values."""
    if isinstance(value, dict):
        return any(map(_is_something, value.values()))
    return value is not None and not (isinstance(value, list) and not value)


def _columns_of(content: dict[str, Any]) -> dict[str, Any]:
    data = content.get("rollout_data")
    return data if isinstance(data, dict) else {}


def _numbers(place: str, name: str, value: Any) -> Any:
    """Convert tensors and arrays to numbers, also inside lists and dictionaries."""
    if isinstance(value, list) and any(isinstance(one, torch.Tensor | Inert) for one in value):
        return [_numbers(place, name, one) for one in value]
    if isinstance(value, dict):
        return {key: _numbers(place, name, one) if isinstance(one, torch.Tensor) else one for key, one in value.items()}
    if not isinstance(value, torch.Tensor | Inert):
        return value
    try:
        return value.tolist()
    except (ValueError, RuntimeError, TypeError) as error:  # sparse, or without saved values
        why = first_line(error)
        raise InputError(
            f"{place}: `{name:.40}` is a tensor without plain numbers ({why}); save it dense, on the CPU"
        ) from error


SLIME = Format(
    "slime",
    (
        Column("tokens", required=True),
        *optional(step="rollout_id", group="group_index", reward="reward", response="response"),
        *optional(response_mask="loss_mask", old_logprobs="log_probs"),
        *optional(ref_logprobs="ref_log_probs", advantage="advantages"),
        *optional(sampler_logprobs="rollout_log_probs", prompt_ids="prompt_ids", response_ids="response_ids"),
        *optional(old_logprobs="rollout_log_probs"),
    ),
    _rows,
    suffix=".pt",
    read=_read_samples,
    notes=(
        "ratios are relative to slime's log_probs (the trainer's own, before the step) if the log has them, otherwise "
        "to its rollout_log_probs; a run with --use-rollout-logprobs trained with the latter: leave its train data out",
    ),
)
