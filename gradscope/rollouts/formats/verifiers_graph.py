"""Traces of verifiers' message graph: a JSON object per rollout, whose nodes hold the tokens that each message adds.

Each path from a root to a leaf is a sequence. If a trace forks, each path is its own response, and a message shared by
several paths is trained only in the first. `mask` is true for sampled tokens. The sampler's `logprobs` and a trainer's
annotations (`trainer_logprobs`, `reference_logprobs`, `advantages`, `entropies`) have an entry per sampled token,
`loss_weights` one per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gradscope.errors import InputError, show
from gradscope.rollouts.batch import LARGEST
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import Answers, Format, Row, need
from gradscope.rollouts.formats.sequences import split_sequence

FAILED = "they ended in an error: trainers leave them out, also from their group"
OTHERS = "they are from an agent that is not trained"
UNRESUMED = "the harness did not continue from them (an attempt to compact the messages)"
NO_IDS = "their messages hold no token ids: the client that sampled them returned none"

PER_TOKEN = {
    "advantage": "advantages",
    "old_logprobs": "logprobs",
    "sampler_logprobs": "logprobs",
    "logprobs": "trainer_logprobs",
    "ref_logprobs": "reference_logprobs",
    "entropy": "entropies",
}


def trace_rows(
    record: Record, *, group: Any = None, step: int | None = None, stale: str | None = None
) -> Iterator[Row]:
    """Yield a row for each path of one trace.

    group: identifies the prompt; None: the trace's task. stale: remark to add if older weights sampled the trace.
    """
    nodes = read_nodes(record)
    reason = _reason_to_leave_out(record, nodes)
    if reason is not None:
        yield Row(record.place, {}, step, left_out=reason)
        return
    common = {"group": _group(record) if group is None else group}
    common |= _known("reward", _reward(record)) | _known("temperature", _temperature(record))
    arrays = {"ids": "token_ids", "mask": "mask", "per_token": PER_TOKEN, "weights": "loss_weights"}
    trained: set[int] = set()
    for path in node_paths(nodes):
        if _is_unresumed(nodes, path[-1]):
            yield Row(record.place, {}, step, left_out=UNRESUMED)
            continue
        branch = Record(record.path, f"{record.place}, path to node {path[-1]}", _join(record, nodes, path, trained))
        trained.update(path)
        row = split_sequence(branch, **arrays, columns=dict(common), step=step)
        yield row if stale is None else replace(row, remarks=(*row.remarks, stale))


def _reason_to_leave_out(record: Record, nodes: list[dict[str, Any]]) -> str | None:
    agent = record.columns.get("agent")
    if record.columns.get("ok", not record.columns.get("errors")) is False:
        return FAILED
    if isinstance(agent, dict) and agent.get("trainable") is False:
        return OTHERS
    return None if any(node.get("token_ids") for node in nodes) else NO_IDS


def _is_unresumed(nodes: list[dict[str, Any]], leaf: int) -> bool:
    """Return whether the leaf is a compaction attempt that no other message continues."""
    links = [_links(node) for node in nodes]
    attempt = any(link.get("type") == "compaction_attempt" for link in links[leaf])
    return attempt and not any(
        link.get("type") == "compaction" and link.get("node") == leaf for own in links for link in own
    )


def _links(node: dict[str, Any]) -> list[dict[str, Any]]:
    found = node.get("semantic_parents")
    return [link for link in found if isinstance(link, dict)] if isinstance(found, list) else []


def node_paths(nodes: list[dict[str, Any]]) -> list[list[int]]:
    """Return the nodes from a root to each leaf, in leaf order."""
    parents, paths = {node.get("parent") for node in nodes}, []
    for leaf in (place for place in range(len(nodes)) if place not in parents):
        path: list[int] = []
        place: int | None = leaf
        while place is not None:
            path.append(place)
            place = nodes[place].get("parent")
        paths.append(path[::-1])
    return paths


def read_nodes(record: Record) -> list[dict[str, Any]]:
    nodes = need(record, "nodes")
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
        raise InputError(f"{record.place}: `nodes` is {show(nodes)}; give a list of messages, or leave the record out")
    for place, node in enumerate(nodes):
        parent = node.get("parent")
        if not (parent is None or (isinstance(parent, int) and 0 <= parent < place)):
            raise InputError(f"{record.place}: the parent of node {place} is {show(parent)}, not an earlier node")
    return nodes


def _join(record: Record, nodes: list[dict[str, Any]], path: list[int], trained: set[int]) -> dict[str, list[Any]]:
    """Concatenate a path's ids, mask and per-token numbers, with None for unknown numbers.

    trained: nodes trained in earlier paths, which are only context here.
    """
    out: dict[str, list[Any]] = {"token_ids": [], "mask": [], "loss_weights": []}
    out |= {name: [] for name in set(PER_TOKEN.values())}
    for place in path:
        node = nodes[place]
        ids, mask = (node.get(name) or [] for name in ("token_ids", "mask"))
        if not (isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask)):
            raise InputError(f"{record.place}: the ids and mask of node {place} differ in length; leave the record out")
        out["token_ids"] += ids
        out["mask"] += [False] * len(mask) if place in trained else mask
        out["loss_weights"] += _loss_weights(record, place, node, len(mask))
        for name in set(PER_TOKEN.values()):
            out[name] += _align(record, place, name, node.get(name), mask)
    # As in verifiers, a message without credit gets 0 if other messages have credit.
    if any(value is not None for value in out["advantages"]):
        pairs = zip(out["advantages"], out["mask"], strict=True)
        out["advantages"] = [0.0 if value is None and kept else value for value, kept in pairs]
    return out


def _align(record: Record, place: int, name: str, values: Any, mask: list[Any]) -> list[Any]:
    """Expand a list with a number per sampled token to all of the node's tokens, with None for the others."""
    sampled = sum(bool(kept) for kept in mask)
    if not values:
        return [None] * len(mask)
    if not isinstance(values, list) or len(values) != sampled:
        raise InputError(
            f"{record.place}: `{name}` of node {place} is {show(values)}; give one for each of its {sampled} sampled "
            "tokens"
        )
    known = iter(values)
    return [next(known) if kept else None for kept in mask]


def _loss_weights(record: Record, place: int, node: dict[str, Any], length: int) -> list[Any]:
    """Return each token's weight in the policy gradient, None if it is not in the trace."""
    streams = node.get("loss_weights")
    stream = streams.get("rl") if isinstance(streams, dict) else None
    if stream is None:
        return [None] * length
    if not isinstance(stream, list) or len(stream) != length:
        raise InputError(
            f"{record.place}: the loss weights `rl` of node {place} are {show(stream)}; give one for each of its "
            f"{length} tokens"
        )
    return stream


def _group(record: Record) -> Any:
    """Return the task's key or hash, shared by all its rollouts."""
    task = need(record, "task")
    found = next((task[name] for name in ("key", "hash") if task.get(name)), None) if isinstance(task, dict) else None
    if found is None:
        raise InputError(
            f"{record.place}: `task` has neither key nor hash, so the rollouts of one prompt cannot be identified"
        )
    return found


def _reward(record: Record) -> float | None:
    """Return Σ score · weight of the scored rewards; None if none was scored."""
    rewards = record.columns.get("rewards") or {}
    parts = [part for part in rewards.values() if part is not None] if isinstance(rewards, dict) else [rewards]
    if any(not isinstance(part, dict) for part in parts):
        raise InputError(f"{record.place}: `rewards` is {show(rewards)}; give {{name: {{score, weight}}, …}}")
    pairs = [(part.get("score"), part.get("weight", 1.0)) for part in parts]
    if not pairs or any(score is None for score, _ in pairs):
        return None
    if not all(isinstance(number, int | float) and abs(number) <= LARGEST for pair in pairs for number in pair):
        raise InputError(f"{record.place}: `rewards` is {show(rewards)}; give finite scores and weights")
    return float(sum(score * weight for score, weight in pairs))


def _temperature(record: Record) -> float | None:
    """Return the temperature of the first call that records one."""
    calls = record.columns.get("calls")
    for call in calls if isinstance(calls, list) else []:
        sampling = call.get("sampling") if isinstance(call, dict) else None
        if isinstance(sampling, dict) and sampling.get("temperature") is not None:
            return sampling["temperature"]
    return None


def _known(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {name: value}


VERIFIERS_GRAPH = Format(
    "verifiers_graph",
    needs=frozenset({"nodes", "task", "rewards"}),
    knows=(
        "version id verifiers agent tools calls metrics info errors timing state root_reply request_rewrites "
        "response_rewrites mm_token_type_id_map stop_condition is_completed"
    ),
    rows=lambda records, policy: (row for record in records for row in trace_rows(record)),
    notes=("each path through a trace's messages, from a first to a last one, is a response",),
    answers=Answers(
        group="the task's `key`, else its `hash`",
        step="none",
        sampled=(
            "those that a node's `mask` keeps, in the first path through the node, and whose `rl` loss weight, if "
            "any, is not 0"
        ),
        logprobs=(
            "`logprobs` of the nodes: the sampler's, denominator of the ratios; `trainer_logprobs`: the trainer's; "
            "rounded to four decimals; the temperature is in `calls`"
        ),
        left_out=(
            "traces that ended in an error, come from untrained agents, or have no token ids; compaction attempts "
            "that were not continued"
        ),
        checked="verifiers 0.4.0: its own code; 2026-11-27",
    ),
)
