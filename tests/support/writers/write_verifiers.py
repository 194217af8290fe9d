"""verifiers' own records of rollouts that are made here: results.jsonl of its versions up to 0.3, traces of later ones.

Package: verifiers. Called, in 0.1.14 (`results`): `states_to_outputs`, `save_outputs` of verifiers.utils.save_utils. In
0.4.0 (`traces`): `Trace`, `Episode`, `trace_store.write_episode`, as `vf eval` does; and `Episode.to_record`, which
prime-rl's orchestrator writes, with annotations beside it that are made here from its source (write_prime_rl.py).

    PYTHONPATH=tests python tests/support/writers/write_verifiers.py OUT results|traces
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from support.writers.sampled import EOS, STEPS, Sample, flat, words

TEMPERATURE = 0.75


def write_results(out: Path) -> None:
    """One evaluation; its second row was made by a client that failed, and its first answer is cut off."""
    from verifiers.types import RolloutTiming, State
    from verifiers.utils.save_utils import save_outputs, states_to_outputs

    states = []
    for at, sample in enumerate(flat(0)):
        state = State(example_id=at // 3, prompt=[{"role": "user", "content": words(sample.prompt)}], answer="42")
        state |= {"completion": [{"role": "assistant", "content": words(sample.response)}], "reward": sample.reward}
        state |= {"metrics": {}, "is_completed": True, "is_truncated": sample.end == "length"}
        state["timing"] = RolloutTiming(start_time=0.0)
        if at == 1:
            state |= {"completion": None, "error": RuntimeError("the client failed"), "stop_condition": "has_error"}
        states.append(state)
    save_outputs(states_to_outputs(states), out)


def write_traces(out: Path) -> None:
    """eval/traces.jsonl of an evaluation; prime-rl's rollouts/ of the first step, and traces/ of both."""
    from verifiers.v1.episode import EvalRunInfo
    from verifiers.v1.utils.trace_store import write_episode

    episodes = [_episode(step, at, sample) for step in range(len(STEPS)) for at, sample in enumerate(flat(step))]
    (out / "eval").mkdir(parents=True)
    for episode in episodes[:6]:
        write_episode(out / "eval", episode.model_copy(update={"run": EvalRunInfo(id="eval")}))
    for episode in episodes:
        step = episode.run.work.step
        evaluated = step == 1 and episode is episodes[5]
        kind = "eval" if evaluated else "train"
        record = episode.to_record()
        if evaluated:
            record["run"]["work"]["type"] = "eval"
        sampled = any(any(node.mask) for trace in episode.traces for node in trace.nodes)
        if step == 1:
            _append(out / "rollouts" / f"step_{step}" / kind / "all" / "traces.jsonl", record)
        if step == 1 and kind == "train" and sampled:
            _append(out / "rollouts" / f"step_{step}" / kind / "effective" / "traces.jsonl", record)
        for trace in record["traces"]:
            for node in trace["nodes"]:
                node["advantages"] = None  # written as it arrives, before it is known
        _append(out / "traces" / f"step_{step}" / f"{kind}.jsonl", record)
        if kind == "train":
            _annotate(out / "traces" / f"step_{step}" / "annotations", episode, step)


def _episode(step: int, at: int, sample: Sample) -> Any:
    """An episode of one trace; the fourth forks after its prompt, of the fifth the second turn follows a tool's."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.episode import EnvInfo, Episode, GroupInfo, PolicySpan, TrainRunInfo, TrainWorkInfo
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import State
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, ModelCall, Trace, TraceTask
    from verifiers.v1.types import Sampling

    advantage = sample.reward - fmean(one.reward for one in STEPS[step][at // 3])
    task = TraceTask(type="Math", data=WireTaskData(), key=f"question-{step}-{at // 3}", hash=f"{step}{at // 3}")
    nodes = [MessageNode(message=vf.UserMessage(content=words(sample.prompt)), token_ids=sample.prompt,
                         mask=[False] * len(sample.prompt))]  # fmt: skip
    for keep, ids, values in _turns(sample):
        message = vf.AssistantMessage(content=words(ids)) if keep else vf.UserMessage(content=words(ids))
        told = {"logprobs": values, "advantages": [advantage] * len(ids)} if keep else {}
        nodes.append(MessageNode(parent=len(nodes) - 1, message=message, sampled=keep, token_ids=ids,
                                 mask=[keep] * len(ids), timestamp=0.0, **told))  # fmt: skip
    if at == 3 and step == 1:  # the same answer, asked again, and another that follows it
        nodes.append(MessageNode(parent=1, message=vf.UserMessage(content="w40"), token_ids=[40], mask=[False]))
        nodes.append(MessageNode(parent=2, message=vf.AssistantMessage(content="w41"), sampled=True,
                                 token_ids=[41, EOS], mask=[True, True], logprobs=[-0.5, -0.25],
                                 advantages=[advantage] * 2))  # fmt: skip
        nodes.append(MessageNode(parent=1, message=vf.UserMessage(content="w42"), token_ids=[42], mask=[False]))
        nodes.append(MessageNode(parent=4, message=vf.AssistantMessage(content="w43"), sampled=True,
                                 token_ids=[43, EOS], mask=[True, True], logprobs=[-0.75, -0.25],
                                 advantages=[advantage] * 2))  # fmt: skip
    for node in nodes:
        node.timestamp = 0.0
    calls = [ModelCall(node=place, sampling=Sampling(temperature=TEMPERATURE))
             for place, node in enumerate(nodes) if node.sampled]  # fmt: skip
    trace = Trace[WireTaskData, State, WireAgentConfig](
        id=f"trace-{step}-{at}", task=task, agent=AgentInfo(config=WireAgentConfig(), trainable=True), nodes=nodes,
        calls=calls, is_completed=True, ok=not sample.dropped, stop_condition="agent_completed",
    )  # fmt: skip
    trace.record_reward("right", sample.reward)
    trace.rewards["style"] = None
    trace.timing.start = 0.0
    work = TrainWorkInfo(step=step + 1, policy=PolicySpan(start=max(0, step - (at == 0)), end=step))
    return Episode[WireTaskData, State, WireAgentConfig](
        id=f"episode-{step}-{at}", env=EnvInfo(id="math"), task=task, group=GroupInfo(id=f"group-{step}-{at // 3}"),
        run=TrainRunInfo(id="run", work=work), ok=trace.ok, traces=[trace],
    )  # fmt: skip


def _turns(sample: Sample) -> list[tuple[bool, list[int], list[float]]]:
    """Runs of tokens that were sampled, and that were not, with the sampler's numbers."""
    turns: list[tuple[bool, list[int], list[float]]] = []
    for token, value, keep in zip(sample.response, sample.sampler, sample.mask, strict=True):
        if not turns or turns[-1][0] != bool(keep):
            turns.append((bool(keep), [], []))
        turns[-1][1].append(token)
        turns[-1][2].append(value)
    return turns


def _annotate(folder: Path, episode: Any, step: int) -> None:
    """What orchestrator and trainer add to a trace that was trained: one that failed, or is empty, was not."""
    for trace in episode.traces:
        if not trace.ok or not any(any(node.mask) for node in trace.nodes):
            continue
        branches = [{"index": branch.index, "advantages": branch.advantages} for branch in trace.branches]
        about = {"train": {"effective": True, "trained_at_step": step}, "advantage": None}
        _append(
            folder / "orchestrator.jsonl", {"version": 1, "trace_id": trace.id, "info": about, "branches": branches}
        )
        for branch in trace.branches:
            pairs = zip(branch.logprobs, branch.sampled_mask, strict=True)
            own = [value - 0.125 if keep else -3.0 for value, keep in pairs]
            own[0] = None
            entropies = [None if value is None else -2 * value for value in own]
            stream = {"index": branch.index, "trainer_logprobs": own, "entropies": entropies}
            about = {"train": {"trained_at_step": step}}
            _append(folder / "trainer.jsonl", {"version": 1, "trace_id": trace.id, "info": about, "branches": [stream]})


def _append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record, default=str) + "\n")


if __name__ == "__main__":
    {"results": write_results, "traces": write_traces}[sys.argv[2]](Path(sys.argv[1]))
