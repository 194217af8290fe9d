"""Logs of prime-rl and of verifiers, whose environments it trains in: token exports, text, and message graphs.

PRIME_RL: token_exports/step_{n}/rank_{r}.jsonl, a line per sequence, with a marker file STABLE. Every array is as long
as token_ids, and entry s belongs to token s; non-finite values are null. loss_mask keeps the tokens of all three loss
terms; rl_weights, if present, gives each token's weight in the policy-gradient term.

VERIFIERS: results.jsonl of versions up to 0.3, a line per rollout, text with a reward. A failed rollout has no
completion, or an `error`.

VERIFIERS_GRAPH: later versions' traces, an object per rollout, whose nodes hold the tokens that each message adds. Each
path from a root to a leaf is a sequence. If a trace forks, each path is its own response, and a message shared by
several paths is trained only in the first. `mask` is true for sampled tokens. The sampler's `logprobs` and a trainer's
annotations have an entry per sampled token, `loss_weights` one per token.

PRIME_RL_TRACES: a stream of episodes with such traces, and annotations with what becomes known of a trace later:
{trace_id, info, branches: [{index, advantages, trainer_logprobs, …}]}. Each list has an entry per token of the
branch, or of its trained part, null if unknown; the newest annotation counts. A folder `traces` holds stream.jsonl, or
numbered files in stream/ (sealed: .jsonl.zst), and annotations/; or a folder step_N per step, with train.jsonl,
eval.jsonl and annotations/. Older versions wrote episodes to rollouts/step_N/train/{all,effective}/traces.jsonl;
trained ones are in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.batch import LARGEST
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import (
    EMPTY,
    EVALUATED,
    NO_SPECIAL_TOKENS,
    RETOKENISED,
    Column,
    Format,
    Row,
    need,
    need_objects,
    optional,
    required,
    whole_number,
)
from gradscope.rollouts.formats.columns import dig, read_row, read_rows

FAILED = "they ended in an error"
UNTRAINED_ERROR = "they ended in an error: trainers leave them out, also from their group"
OTHERS = "they are from an agent that is not trained"
UNRESUMED = "the harness did not continue from them (an attempt to compact the messages)"
NO_IDS = "their messages hold no token ids: the client that sampled them returned none"
UNTRAINED = "no annotation of the trainer covers them, though others are covered"
STALE = "they were sampled, at least at first, with weights older than those of the previous step"
ONLY_DISTILLED = (
    "they are only distilled, a term with a denominator of its own beside the others' policy gradient; a step of these "
    "alone is read"
)
DISTILLED = {"weighting": "opd:fall=0.2"}
"""prime-rl's distillation (ref_kl): reverse KL as the advantage, none where π fell by more than 0.2."""
STREAMS = ("advantages", "trainer_logprobs")
PATHS = "each path through a trace's messages, from a first to a last one, is a response"

PATH = Format(
    "path",
    (
        *required(ids="token_ids", mask="mask"),
        *optional(advantage="advantages", old_logprobs="logprobs", sampler_logprobs="logprobs"),
        *optional(ref_logprobs="reference_logprobs", weight="loss_weights.rl", distilled="loss_weights.ref_kl"),
    ),
    distilled=DISTILLED,
)
"""A path through a trace, its nodes' numbers joined."""
WEIGHTS = ("loss_weights.rl", "loss_weights.ref_kl")
PER_TOKEN = sorted({column.place for column in PATH.columns} - {"token_ids", "mask", *WEIGHTS})


def _trace_rows(
    record: Record, *, group: Any = None, step: int | None = None, stale: str | None = None
) -> Iterator[Row]:
    """Yield a row for each path of one trace.

    group: identifies the prompt; None: the trace's task. stale: remark to add if older weights sampled the trace.
    """
    nodes, told = _read_nodes(record), {**read_row(VERIFIERS_GRAPH, record).columns, "step": step}
    fails = record.columns.get("ok", not record.columns.get("errors")) is False
    others = dig(record.columns, "agent.trainable") is False
    if fails or others or not any(node.get("token_ids") for node in nodes):
        yield Row(record.place, {}, step, left_out=UNTRAINED_ERROR if fails else OTHERS if others else NO_IDS)
        return
    task = told.get("group") or dig(record.columns, "task.hash")
    told["group"] = group = task if group is None else group
    if group in (None, ""):
        raise InputError(
            f"{record.place}: `task` has neither key nor hash, so the rollouts of one prompt cannot be identified"
        )
    told |= {"reward": _reward(record)}
    known = {name: told[name] for name in ("group", "reward", "temperature", "step") if told.get(name) is not None}
    trained: set[int] = set()
    for path in _node_paths(nodes):
        if _is_unresumed(nodes, path[-1]):
            yield Row(record.place, {}, step, left_out=UNRESUMED)
            continue
        parts = [_per_token(record, place, nodes[place], is_context=place in trained) for place in path]
        joined = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        # As in verifiers, a message without credit gets 0 if other messages have credit.
        if any(value is not None for value in joined["advantages"]):
            pairs = zip(joined["advantages"], joined["mask"], strict=True)
            joined["advantages"] = [0.0 if value is None and kept else value for value, kept in pairs]
        trained.update(path)
        row = read_row(PATH, Record(record.path, f"{record.place}, path to node {path[-1]}", joined), known)
        yield row if stale is None else replace(row, remarks=(*row.remarks, stale))


def _per_token(record: Record, place: int, node: dict[str, Any], *, is_context: bool) -> dict[str, list[Any]]:
    """Return a node's lists with an entry per token, None where the trace has none.

    is_context: whether an earlier path trained on the node.
    """
    ids, mask = (node.get(name) or [] for name in ("token_ids", "mask"))
    if not (isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask)):
        raise InputError(f"{record.place}: the ids and mask of node {place} differ in length; leave the record out")
    found = {"token_ids": ids, "mask": [False] * len(mask) if is_context else mask}
    sampled = sum(map(bool, mask))
    lists = {name: (node.get(name), sampled) for name in PER_TOKEN}
    for name, (values, length) in (lists | {name: (dig(node, name), len(mask)) for name in WEIGHTS}).items():
        values = values or [None] * length
        if not isinstance(values, list) or len(values) != length:
            raise InputError(
                f"{record.place}: `{name}` of node {place} is {show(values)}; give one for each of its {length} "
                f"{'tokens' if length == len(mask) else 'sampled tokens'}"
            )
        each = iter(values)
        found[name] = [next(each) if kept or name in WEIGHTS else None for kept in mask]
    return found


def _is_unresumed(nodes: list[dict[str, Any]], leaf: int) -> bool:
    """Return whether the leaf is a compaction attempt that no other message continues."""
    given = [node.get("semantic_parents") for node in nodes]
    links = [[link for link in own if isinstance(link, dict)] if isinstance(own, list) else [] for own in given]
    attempt = any(link.get("type") == "compaction_attempt" for link in links[leaf])
    goes_on = (link.get("type") == "compaction" and link.get("node") == leaf for own in links for link in own)
    return attempt and not any(goes_on)


def _node_paths(nodes: list[dict[str, Any]]) -> list[list[int]]:
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


def _read_nodes(record: Record) -> list[dict[str, Any]]:
    nodes = need(record, "nodes")
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
        raise InputError(f"{record.place}: `nodes` is {show(nodes)}; give a list of messages, or leave the record out")
    for place, node in enumerate(nodes):
        parent = node.get("parent")
        if not (parent is None or (isinstance(parent, int) and 0 <= parent < place)):
            raise InputError(f"{record.place}: the parent of node {place} is {show(parent)}, not an earlier node")
    return nodes


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


def _episode_rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    episodes: list[Record] = []
    updates: dict[str, list[Record]] = {}
    for record in records:
        if "traces" in record.columns:
            episodes.append(record)
        elif "branches" in record.columns:
            updates.setdefault(str(record.columns.get("trace_id")), []).append(record)
    shipped = any(_is_trained(update) for own in updates.values() for update in own)
    training = any(_work(episode, "type") == "train" for episode in episodes)
    for episode in episodes:
        for number, trace in enumerate(need_objects(episode, "traces")):
            known = {name: value for name, value in trace.items() if value is not None}
            task = _object(episode, "task")
            record = Record(episode.path, f"{episode.place}, trace {number}", {"task": task} | known)
            is_eval = _work(episode, "type") == "eval" and (training or dig(episode.columns, "run.work") is not None)
            own = updates.get(str(trace.get("id")), [])
            info = _fold(record, own) if trace.get("nodes") else {}
            untrained = shipped and not any(map(_is_trained, own))
            if not trace.get("nodes") or is_eval or untrained:
                reason = EMPTY if not trace.get("nodes") else EVALUATED if is_eval else UNTRAINED
                yield Row(record.place, {}, left_out=reason)
                continue
            trained_at = dig(info, "train.trained_at_step")
            told = {"step": _work(episode, "step") if trained_at is None else trained_at}
            step, begun = whole_number(replace(record, columns=told), "step"), _work(episode, "policy.start")
            stale = STALE if isinstance(begun, int) and step is not None and begun < step - 1 else None
            yield from _trace_rows(record, group=dig(episode.columns, "group.id"), step=step, stale=stale)


def _work(episode: Record, name: str) -> Any:
    """Return an entry of the `work` of the episode's run, or of the run itself if it has none."""
    return dig(episode.columns, f"run.work.{name}" if dig(episode.columns, "run.work") else f"run.{name}")


def _is_trained(update: Record) -> bool:
    """Return whether an annotation marks the trace as trained: by the trainer's values, or as `effective`."""
    sent = dig(update.columns, "info.train.effective") is True
    return sent or any(branch.get("trainer_logprobs") for branch in need_objects(update, "branches"))


def _object(record: Record, name: str) -> dict[str, Any]:
    """Return a JSON object of the record, or an empty one if it is missing."""
    return _object_of(record.columns.get(name))


def _object_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _of_one_loss(rows: Iterable[Row]) -> Iterator[Row]:
    """Leave out, in each step, sequences that are only distilled if others have a policy gradient."""
    for _, own in groupby(rows, key=lambda row: row.step):
        own = [*own]
        mixed = any(row.left_out is None and row.loss is not DISTILLED for row in own)
        yield from (
            replace(row, left_out=ONLY_DISTILLED) if mixed and row.left_out is None and row.loss is DISTILLED else row
            for row in own
        )


def _fold(record: Record, updates: list[Record]) -> dict[str, Any]:
    """Merge the updates' per-token values into the trace's nodes; return `info` with the newest value of each name."""
    nodes, info = _read_nodes(record), dict(_object(record, "info"))
    paths = _node_paths(nodes)
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
            weights = _object_of(node.get("loss_weights")) or {"rl": [1.0] * len(mask)}
            rest = [0.0] * (len(mask) - len(own))
            node["loss_weights"] = {n: [*v[: len(own)], *rest] for n, v in weights.items() if isinstance(v, list)}


def _mask(node: dict[str, Any]) -> list[Any]:
    """Return the node's mask; anything but a list is refused later, with the node's ids."""
    mask = node.get("mask")
    return mask if isinstance(mask, list) else []


PRIME_RL = Format(
    "prime_rl",
    (
        *required(ids="token_ids", mask="loss_mask", old_logprobs="inference_logprobs"),
        *optional(step="step", advantage="advantages", sampler_logprobs="inference_logprobs", weight="rl_weights"),
        *optional(distilled="ref_kl_weights"),
    ),
    lambda records, policy: _of_one_loss(read_rows(PRIME_RL, records)),
    distilled=DISTILLED,
    notes=(
        "ratios are of prime-rl's trainer_logprobs to its inference_logprobs, as in training",
        "the log does not identify prompts: sequences of a step with the same tokens before the first trained one form "
        "a group",
    ),
    is_finished=lambda path: (path.parent / "STABLE").exists(),
)

VERIFIERS = Format(
    "verifiers",
    (
        *required(group="example_id", reward="reward"),
        *optional(prompt="prompt", response="completion"),
    ),
    left_out=((FAILED, lambda record: "completion" not in record.columns or record.columns.get("error")),),
    notes=(RETOKENISED, NO_SPECIAL_TOKENS),
)

VERIFIERS_GRAPH = Format(
    "verifiers_graph",
    (
        *(Column(name, required=True) for name in ("nodes", "task", "rewards")),
        *(Column("group", "task.key"), Column("group", "task.hash")),
        Column("temperature", "calls.sampling.temperature"),
    ),
    lambda records, policy: _of_one_loss(row for record in records for row in _trace_rows(record)),
    notes=(PATHS,),
)

PRIME_RL_TRACES = Format(
    "prime_rl_traces",
    tuple(Column(name, required=True) for name in ("traces", "task")),
    lambda records, policy: _of_one_loss(_episode_rows(records, policy)),
    beside=(frozenset({"trace_id", "branches"}), frozenset({"chunk", "offset"})),
    notes=(
        "ratios are relative to the sampler's log-probabilities, as in prime-rl's training",
        PATHS,
    ),
)
