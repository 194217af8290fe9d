"""prime-rl's traces: a stream of episodes, JSON objects with traces of verifiers' message graph, and annotations.

Annotations add what becomes known of a trace later: {trace_id, info, branches: [{index, advantages, trainer_logprobs,
entropies}]}. Each list has an entry per token of the branch, or of its trained part, null if unknown; the newest
annotation counts. A folder `traces` holds stream.jsonl, or numbered files in stream/ (sealed: .jsonl.zst), and
annotations/; or a folder step_N per step, with train.jsonl, eval.jsonl and annotations/. Older versions wrote episodes
to rollouts/step_N/train/{all,effective}/traces.jsonl; trained ones are in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import EMPTY, EVALUATED, TORN, Answers, Format, Row, need_objects, whole_number
from gradscope.rollouts.formats.verifiers_graph import node_paths, read_nodes, trace_rows

STREAMS = ("advantages", "trainer_logprobs", "entropies")
UNTRAINED = "no annotation of the trainer covers them, though others are covered"
STALE = "they were sampled, at least at first, with weights older than those of the previous step"


def _rows(records: Iterable[Record], _policy: Policy | None) -> Iterator[Row]:
    episodes: list[Record] = []
    updates: dict[Any, list[Record]] = {}
    for record in records:
        if record.torn:
            yield Row(record.place, {}, left_out=TORN)
        elif "traces" in record.columns:
            episodes.append(record)
        elif "branches" in record.columns:
            updates.setdefault(_id(record, record.columns.get("trace_id")), []).append(record)
    shipped = any(_is_trained(update) for own in updates.values() for update in own)
    training = any(_work(episode).get("type") == "train" for episode in episodes)
    for episode in episodes:
        work = _work(episode)
        for number, trace in enumerate(_traces(episode)):
            place = f"{episode.place}, trace {number}"
            record = Record(episode.path, place, {"task": _object(episode, "task")} | trace)
            if not trace.get("nodes"):
                yield Row(place, {}, left_out=EMPTY)
                continue
            if work.get("type") == "eval" and (training or "work" in _object(episode, "run")):
                yield Row(place, {}, left_out=EVALUATED)
                continue
            own = updates.get(_id(record, trace.get("id")), [])
            info = _fold(record, own)
            if shipped and not any(map(_is_trained, own)):
                yield Row(place, {}, left_out=UNTRAINED)
                continue
            known = info.get("train") if isinstance(info.get("train"), dict) else {}
            step = {"step": known.get("trained_at_step", work.get("step"))}
            step = whole_number(Record(episode.path, place, step), "step")
            stale = STALE if _is_stale(work.get("policy"), step) else None
            yield from trace_rows(record, group=_object(episode, "group").get("id"), step=step, stale=stale)


def _work(episode: Record) -> dict[str, Any]:
    """Return the `work` of the episode's run, or the run itself if it has none."""
    run = _object(episode, "run")
    return run["work"] if isinstance(run.get("work"), dict) else run


def _is_trained(update: Record) -> bool:
    """Return whether an annotation marks the trace as trained: by the trainer's values, or as `effective`."""
    known = _object(update, "info").get("train")
    sent = isinstance(known, dict) and known.get("effective") is True
    return sent or any(branch.get("trainer_logprobs") for branch in need_objects(update, "branches"))


def _is_stale(policy: Any, step: int | None) -> bool:
    """Return whether the weights that began sampling a trace are older than those of step − 1."""
    begun = policy.get("start") if isinstance(policy, dict) else None
    return isinstance(begun, int) and step is not None and begun < step - 1


def _traces(episode: Record) -> list[dict[str, Any]]:
    traces = need_objects(episode, "traces")
    return [{name: value for name, value in trace.items() if value is not None} for trace in traces]


def _object(record: Record, name: str) -> dict[str, Any]:
    """Return a JSON object of the record, or an empty one if it is missing."""
    value = record.columns.get(name)
    return value if isinstance(value, dict) else {}


def _id(record: Record, given: Any) -> str | int | None:
    """Return the trace's id."""
    if not isinstance(given, str | int | None):
        raise InputError(f"{record.place}: the trace's id is {show(given)}; give a string, or leave the row out")
    return given


def _fold(record: Record, updates: list[Record]) -> dict[str, Any]:
    """Merge the updates' per-token values into the trace's nodes; return `info` with the newest value of each name."""
    nodes, info = read_nodes(record), dict(_object(record, "info"))
    paths = node_paths(nodes)
    for update in updates:
        info |= _object(update, "info")
        for branch in need_objects(update, "branches"):
            index = branch.get("index")
            if not isinstance(index, int) or not 0 <= index < len(paths):
                raise InputError(
                    f"{update.place}: no branch {show(index)} among the {len(paths)} of {record.place}; give traces "
                    "and annotations of the same run"
                )
            for name in STREAMS:
                _split_stream(update, name, branch.get(name), [nodes[place] for place in paths[index]])
    credit = info.get("advantage")
    if isinstance(credit, int | float) and not any(node.get("advantages") for node in nodes):
        for node in nodes:
            node["advantages"] = [credit] * sum(map(bool, _mask(node)))
    return info


def _split_stream(update: Record, name: str, stream: Any, nodes: list[dict[str, Any]]) -> None:
    """Distribute a stream over the nodes' sampled tokens, null if unknown; tokens beyond the cut-off get weight 0."""
    if stream is None:
        return
    if not isinstance(stream, list):
        raise InputError(f"{update.place}: `{name}` is {show(stream)}; give a list, one entry per token")
    start = 0
    for node in nodes:
        mask = _mask(node)
        own, start = stream[start : start + len(mask)], start + len(mask)
        values = [value for value, kept in zip(own, mask, strict=False) if kept]
        if len(own) < len(mask) and node.get(name):
            continue  # another path gave all of its values
        if any(value is not None for value in values):
            node[name] = values + [None] * (sum(map(bool, mask)) - len(values))
        if name == "trainer_logprobs" and len(own) < len(mask):
            node["loss_weights"] = {"rl": [1.0] * len(own) + [0.0] * (len(mask) - len(own))}


def _mask(node: dict[str, Any]) -> list[Any]:
    """Return the node's mask; anything but a list is refused later, with the node's ids."""
    mask = node.get("mask")
    return mask if isinstance(mask, list) else []


PRIME_RL_TRACES = Format(
    "prime_rl_traces",
    needs=frozenset({"traces", "task"}),
    beside=(frozenset({"trace_id", "branches"}), frozenset({"chunk", "offset"})),
    knows="id env group run ok errors version info",
    rows=_rows,
    ends_torn=True,
    notes=(
        "ratios are relative to the sampler's log-probabilities, as in prime-rl's training",
        "each path through a trace's messages, from a first to a last one, is a response",
    ),
    answers=Answers(
        group="the episode's `group.id`",
        step=(
            "`trained_at_step`, else the work's `step`, from 1; `step_N` is the checkpoint after it; a note counts "
            "responses sampled with older weights (`policy`)"
        ),
        sampled=("those that a node's `mask` keeps, in the first path through the node; none that the trainer cut off"),
        logprobs=(
            "`logprobs` of the nodes: vLLM's, denominator of the ratios; `trainer_logprobs`: the trainer's; rounded "
            "to four decimals"
        ),
        left_out=(
            "evaluations of a training run; untrained traces, if others were trained; what verifiers_graph leaves "
            "out; a truncated last line"
        ),
        checked=(
            "prime-rl 559b4477 (2026-08-21; `rollouts/`) and a later state (`traces/`): verifiers 0.4.0's own "
            "records, annotations after the source; 2026-11-27"
        ),
    ),
)
