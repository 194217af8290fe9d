"""Dumps of every trainer's layout, written by hand from the field lists of their sources, of the same four responses.

Only TRL's can be made by the trainer itself here (`run_trl`). All numbers are sums of few powers of two: float32 holds
them exactly, so that what is read can be compared without a tolerance.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch

from support.policies import write_jsonl


@dataclass(frozen=True)
class Sample:
    """One response and all that a trainer may know of it; lists have an entry per response token."""

    prompt: list[int]
    response: list[int]
    group: int
    reward: float
    advantage: float
    sampler: list[float]
    """Log-probabilities of the engine that sampled."""
    trainer: list[float]
    """The trainer's own, before the step."""
    entropy: list[float]
    mask: list[bool]


SAMPLES = [
    Sample([4, 5, 6], [7, 8], 0, 1.0, 0.5, [-0.25, -1.5], [-0.5, -1.25], [1.0, 0.75], [True, True]),
    Sample([4, 5, 6], [9, 7, 8], 0, 0.0, -0.5, [-2.0, -0.5, 0.0], [-2.5, -0.25, 0.0], [2.0, 0.5, 0.0], [True] * 3),
    Sample([11, 12], [13], 1, 3.0, 0.75, [-0.125], [-0.25], [0.25], [True]),
    Sample([11, 12], [14, 15, 16, 17], 1, -1.0, -0.75, [-1.0] * 4, [-1.5] * 4, [1.5] * 4, [True, False, True, True]),
]


def text(ids: list[int]) -> str:
    """As tiny.make_tokenizer writes ids."""
    return " ".join(f"w{i}" for i in ids)


def chat(ids: list[int]) -> list[dict[str, str]]:
    """One user's message."""
    return [{"role": "user", "content": text(ids)}]


def said(ids: list[int]) -> list[dict[str, str]]:
    """One assistant's message."""
    return [{"role": "assistant", "content": text(ids)}]


def write_trl(folder: Path, *, step: int = 3, conversational: bool = False, samples: list[Sample] = SAMPLES) -> Path:
    """completions/completions_00003.parquet, by pandas, as TRL does."""
    import pandas as pd

    path = folder / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {
        "step": [step] * len(samples),
        "prompt": [chat(s.prompt) if conversational else text(s.prompt) for s in samples],
        "completion": [said(s.response) if conversational else text(s.response) for s in samples],
        "accuracy_reward": [s.reward for s in samples],
        "advantage": [s.advantage for s in samples],
    }
    pd.DataFrame(table).to_parquet(path)
    return path


def write_verl(folder: Path, *, step: int = 3, uid: bool = True) -> Path:
    """{step}.jsonl of trainer.rollout_data_dir."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"input": text(s.prompt), "output": text(s.response), "gts": "42", "score": s.reward, "step": step}
        | ({"uid": f"q{s.group}"} if uid else {"request_id": "r"})
        for s in SAMPLES
    ]
    return write_jsonl(folder / f"{step}.jsonl", rows)


def write_prime_rl(folder: Path, *, step: int = 3, rank: int = 0, stable: bool = True, **changes: Any) -> Path:
    """token_exports/step_3/rank_0.jsonl with its marker; changes: columns of every row."""
    path = folder / "token_exports" / f"step_{step}" / f"rank_{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for index, s in enumerate(SAMPLES):
        before, length = len(s.prompt), len(s.prompt) + len(s.response)
        scalars = {"schema_version": 1, "step": step, "rank": rank, "micro_step": 0, "micro_sequence_idx": index}
        scalars |= {"export_sequence_idx": index, "env_name": "math"}
        arrays = {
            "token_ids": s.prompt + s.response,
            "position_ids": list(range(length)),
            "loss_mask": [False] * before + s.mask,
            "advantages": [s.advantage] * length,
            "inference_logprobs": [0.0] * before + s.sampler,
            "trainer_logprobs": [None] + [-3.0] * (before - 1) + s.trainer,
            "entropy": [None] + [3.0] * (before - 1) + s.entropy,
            "importance_ratio": [1.0] * length,
            "is_masked": [False] * (length - 1) + [index == 1],
            "ref_kl_weights": [None] * length,
        }
        rows.append(scalars | arrays | changes)
    if stable:
        (path.parent / "STABLE").touch()
    return write_jsonl(path, rows)


def write_nemo_rl(folder: Path, *, step: int = 3, **changes: Any) -> Path:
    """train_data_step3.jsonl, its arrays padded to the longest sample, each value the one entry of a list."""
    folder.mkdir(parents=True, exist_ok=True)
    width, rows = max(len(s.prompt) + len(s.response) for s in SAMPLES), []
    for s in SAMPLES:
        before, length = len(s.prompt), len(s.prompt) + len(s.response)

        def pad(values: list, fill: Any = 0.0, before: int = before, length: int = length) -> list:
            return [fill] * before + values + [fill] * (width - length)

        rows.append(
            {
                "content": text(s.response),
                "rewards": s.reward,
                "input_lengths": length,
                "token_ids": s.prompt + s.response + [0] * (width - length),
                "token_loss_mask": [int(m) for m in pad(s.mask, False)],
                "sample_loss_mask": 1.0,
                "advantages": [s.advantage] * width,
                "generation_logprobs": pad(s.sampler),
                "prev_logprobs": pad(s.trainer),
            }
            | changes
        )
    sliced = [{name: [value] for name, value in row.items()} for row in rows]
    return write_jsonl(folder / f"train_data_step{step}.jsonl", sliced)


def write_open_instruct(folder: Path, *, step: int = 3) -> Path:
    """grpo_rollouts_000000.jsonl of save_traces."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "step": step,
            "sample_idx": index,
            "prompt_idx": s.group,
            "prompt_tokens": s.prompt,
            "response_tokens": s.response,
            "reward": s.reward,
            "advantage": s.advantage,
            "finish_reason": "stop",
            "dataset": "gsm8k",
            "ground_truth": "42",
            "request_info": {},
            "logprobs": s.sampler,
        }
        for index, s in enumerate(SAMPLES)
    ]
    return write_jsonl(folder / "grpo_rollouts_000000.jsonl", rows)


def slime_rollout_samples() -> list[dict[str, Any]]:
    """The samples of slime's rollout data."""
    return [
        {
            "group_index": s.group,
            "index": index,
            "prompt": text(s.prompt),
            "tokens": s.prompt + s.response,
            "response": text(s.response),
            "response_length": len(s.response),
            "label": "42",
            "reward": s.reward,
            "loss_mask": [int(m) for m in s.mask],
            "rollout_log_probs": s.sampler,
            "status": "completed",
            "metadata": {},
        }
        for index, s in enumerate(SAMPLES)
    ]


def slime_train_samples() -> list[dict[str, Any]]:
    """The samples of slime's train data, in another order."""
    return [
        {
            "sample_index": index,
            "tokens": torch.tensor(s.prompt + s.response),
            "log_probs": torch.tensor(s.trainer),
            "ref_log_probs": torch.tensor(s.trainer),
            "advantages": torch.full((len(s.response),), s.advantage),
            "returns": torch.full((len(s.response),), s.reward),
            "entropy": torch.tensor(s.entropy),
        }
        for index, s in reversed(list(enumerate(SAMPLES)))
    ]


def write_slime(folder: Path, *, rollout_id: int = 3, rollout: bool = True, train: bool = False) -> Path:
    """rollout_3.pt of --save-debug-rollout-data, train_3_0.pt of --save-debug-train-data; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if rollout:
        torch.save({"rollout_id": rollout_id, "samples": slime_rollout_samples()}, folder / f"rollout_{rollout_id}.pt")
    if train:
        content = {"format_version": 2, "rollout_id": rollout_id, "samples": slime_train_samples()}
        torch.save(content, folder / f"train_{rollout_id}_0.pt")
    return folder


def write_miles(folder: Path, *, rollout_id: int = 3, rollout: bool = True) -> Path:
    """train_data/3_0.pt of miles, a list per column, `raw_reward` of all ranks; with its rollout data, if asked for."""
    write_slime(folder, rollout_id=rollout_id, rollout=rollout)
    samples = slime_train_samples()
    data = {name: [sample[name] for sample in samples] for name in samples[0] if name != "entropy"}
    data["sample_indices"] = data.pop("sample_index")
    own = [SAMPLES[index] for index in data["sample_indices"]]
    data["response_lengths"] = torch.tensor([len(s.response) for s in own])
    data["loss_masks"] = [torch.tensor(s.mask, dtype=torch.int) for s in own]
    data["rollout_log_probs"] = [torch.tensor(s.sampler, dtype=torch.float64) for s in own]
    data |= {"rewards": [s.advantage for s in own], "raw_reward": [s.reward for s in SAMPLES]}
    data |= {"dynamic_global_batch_size": 4, "total_lengths": [len(s.prompt + s.response) for s in own]}
    torch.save({"rollout_id": rollout_id, "rank": 0, "rollout_data": data}, folder / f"{rollout_id}_0.pt")
    return folder


def write_ms_swift(folder: Path, *, step: int = 3) -> Path:
    """completions.jsonl: a dictionary of lists per logging call."""
    folder.mkdir(parents=True, exist_ok=True)
    line = {
        "step": [str(step)] * len(SAMPLES),
        "prompt": [text(s.prompt) for s in SAMPLES],
        "completion": [text(s.response) for s in SAMPLES],
        "accuracy": [s.reward for s in SAMPLES],
        "advantages": [s.advantage for s in SAMPLES],
        "solution": ["42"] * len(SAMPLES),
    }
    return write_jsonl(folder / "completions.jsonl", [line])


def write_roll(folder: Path, *, step: int = 3) -> Path:
    """rollout_dump_data.step_3.jsonl: one line, a dictionary of lists."""
    folder.mkdir(parents=True, exist_ok=True)
    line = {
        "global_step": [step] * len(SAMPLES),
        "id": [str(index) for index in range(len(SAMPLES))],
        "source": ["math"] * len(SAMPLES),
        "prompt": [text(s.prompt) for s in SAMPLES],
        "messages": [json.dumps(chat(s.prompt)) for s in SAMPLES],
        "ground_truth": ["42"] * len(SAMPLES),
        "responses": [text(s.response) for s in SAMPLES],
        "scores": [s.reward for s in SAMPLES],
        "sampling_params": [json.dumps({"temperature": 0.5})] * len(SAMPLES),
    }
    return write_jsonl(folder / f"rollout_dump_data.step_{step}.jsonl", [line])


def write_skyrl(folder: Path, *, step: int = 3, pad: int = 1, odd: Any = None, **more: dict[str, Any]) -> Path:
    """dumped_data/global_step_3_training_input.pkl, rows padded on the left; the last `pad` ones fill the batch up.

    odd: an object that stands in the metadata; more: further entries of the batch.
    """
    path = folder / "dumped_data" / f"global_step_{step}_training_input.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [*SAMPLES, *[SAMPLES[0]] * pad]
    width, most = max(len(s.prompt + s.response) for s in rows), max(len(s.response) for s in rows)

    def right(values: list[list], size: int, kind: str) -> dict[str, Any]:
        table = np.array([[0] * (size - len(v)) + v for v in values], dtype=kind)
        return {"format": "numpy", "data": table.tobytes(), "shape": table.shape, "dtype": kind}

    masks = [[float(m) for m in s.mask] for s in SAMPLES] + [[0.0] * len(SAMPLES[0].mask)] * pad
    saved = io.BytesIO()
    trainer = [[0.0] * (most - len(s.trainer)) + s.trainer for s in rows]
    torch.save(torch.tensor(trainer, dtype=torch.bfloat16), saved)
    batch = {
        "sequences": right([s.prompt + s.response for s in rows], width, "int64"),
        "attention_mask": right([[1] * len(s.prompt + s.response) for s in rows], width, "int64"),
        "response_mask": right([[1] * len(s.response) for s in rows], most, "int64"),
        "loss_mask": right(masks, most, "float32"),
        "advantages": right([[s.advantage] * len(s.response) for s in rows], most, "float32"),
        "rollout_logprobs": right([s.sampler for s in rows], most, "float32"),
        "action_log_probs": {"format": "torch", "data": saved.getvalue()},
        "base_action_log_probs": None,
    }
    batch |= more
    bounds = [(0, 2), (2, 4)]
    state = {"batch_dict": batch, "batch_size": len(rows), "device": torch.device("cpu")}
    state["metadata"] = {"policy_prompt_boundaries": bounds, "pad_size": pad, "odd": odd}
    path.write_bytes(_pickle_skyrl(state))
    return path


def _pickle_skyrl(state: dict[str, Any]) -> bytes:
    """The pickle of SkyRL's own class, of which a stand-in is there as long as it takes."""
    name = "skyrl.backends.skyrl_train.training_batch"
    module = ModuleType(name)

    class TrainingInputBatch(dict):
        def __reduce__(self) -> Any:
            return module._rebuild_tensor_batch, (TrainingInputBatch, state)

    def _rebuild_tensor_batch(kind: type, state: Any) -> None: ...

    for thing in (TrainingInputBatch, _rebuild_tensor_batch):
        thing.__module__, thing.__qualname__ = name, thing.__name__
        setattr(module, thing.__name__, thing)
    parts = name.split(".")
    parents = {parent: ModuleType(parent) for parent in (".".join(parts[:n]) for n in range(1, len(parts)))}
    with mock.patch.dict(sys.modules, {**parents, name: module}):
        return pickle.dumps(TrainingInputBatch())


def write_torchtitan(folder: Path, *, version: int = 3, ids: bool = True, **changes: Any) -> Path:
    """rollout_samples.jsonl of torchtitan's recorder; a token that nobody sampled stands between two turns.

    ids: with log_tensors and log_logprobs; changes: columns of every row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index, s in enumerate(SAMPLES):
        row = {"is_validation": False, "group_id": s.group, "rollout_id": index % 2, "status": "completed"}
        row |= {"reward": s.reward, "reward_breakdown": {}, "advantage": s.advantage, "turns": []}
        for number, (start, end) in enumerate(_runs(s.mask) if ids else [(0, len(s.response))]):
            turn = {"turn_id": number, "min_policy_version": version, "max_policy_version": version}
            turn |= {"prompt_messages": chat(s.prompt), "env_messages": [], "env_rewards": {}}
            turn["completion_message"] = said(s.response)[0]
            if ids:
                turn["prompt_token_ids"] = s.prompt + s.response[:start]
                turn |= {"completion_token_ids": s.response[start:end], "completion_logprobs": s.sampler[start:end]}
            row["turns"].append(turn)
        rows.append(row | changes)
    return write_jsonl(folder / "rollout_samples.jsonl", rows)


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """The first and last index, exclusive, of each unbroken run of True."""
    edges = [at for at in range(len(mask) + 1) if [*mask, False][at] != [False, *mask][at]]
    return [*zip(edges[::2], edges[1::2], strict=True)]


def write_areal(folder: Path, *, version: int = 3) -> Path:
    """rollout/3/{task}.jsonl of AReaL, a file per task."""
    for number in {s.group for s in SAMPLES}:
        rows = []
        for index, s in enumerate(one for one in SAMPLES if one.group == number):
            row = {"task_id": number, "sample_idx": index, "seqlen": len(s.prompt + s.response)}
            row |= {"prompt_len": len(s.prompt), "head_version": -1, "tail_version": version, "reward": s.reward}
            rows.append(row | {"prompt": text(s.prompt), "completion": text(s.response)})
        (folder / "rollout" / str(version)).mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / "rollout" / str(version) / f"{number}.jsonl", rows)
    return folder / "rollout"


def write_rllm(folder: Path, *, step: int = 3, ids: bool = False, **changes: Any) -> Path:
    """episodes/train_step_3_epoch_0/episode_….json of rLLM, beside a summary; changes: entries of every step.

    ids: with what `Episode.to_dict` has more.
    """
    out = folder / "episodes" / f"train_step_{step}_epoch_0"
    out.mkdir(parents=True, exist_ok=True)
    for index, s in enumerate(SAMPLES):
        told = {"observation": None, "thought": "", "action": None, "reward": 0.0, "done": False, "timing": {}}
        told |= {"model_response": text(s.response), "chat_completions": chat(s.prompt) + said(s.response)}
        if ids:
            told |= {"prompt_ids": s.prompt, "response_ids": s.response}
            told |= {"logprobs": s.sampler, "advantage": s.advantage}
        trajectory = {"name": "solver", "uid": "u", "reward": s.reward, "num_steps": 1, "timing": {}}
        row = {"training_step": step, "epoch": 0, "episode_id": f"task{s.group}:{index % 2}", "session_id": None}
        row |= {"task": {}, "task_hash": "0", "is_correct": True, "termination_reason": None, "metrics": {}}
        row["trajectories"] = [trajectory | {"steps": [told | changes]}]
        (out / f"episode_hash0_idtask{s.group}_{index % 2}.json").write_text(json.dumps(row, indent=2) + "\n")
    (out / "batch_summary.json").write_text('{\n  "training_step": 3\n}')
    return folder / "episodes"


def write_rl_logging_board(folder: Path, *, step: int = 3, pad: int = 2) -> Path:
    """rl_logging_board_data.jsonl as OpenRLHF writes it, prompts padded on the left and responses on the right."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for s in SAMPLES:
        zeros = [0.0] * pad
        row = {"prompt": " ".join(["<pad>"] * pad + [text(s.prompt)]), "step": step, "reward": s.reward}
        row["response_tokens"] = [*text(s.response).split(), *["<pad>"] * pad]
        row |= {"response": " ".join(row["response_tokens"]), "logprobs": s.trainer + zeros}
        row |= {"ref_logprobs": s.sampler + zeros, "values": None, "token_rewards": [0.0] * len(s.response) + zeros}
        rows.append(row)
    return write_jsonl(folder / "rl_logging_board_data.jsonl", rows)


def write_verifiers(folder: Path) -> Path:
    """results.jsonl beside its metadata.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.json").write_text('{"env_id": "math"}')
    rows = [
        {
            "example_id": s.group,
            "prompt": chat(s.prompt),
            "completion": said(s.response),
            "answer": "42",
            "info": {},
            "reward": s.reward,
            "error": None,
            "timing": {},
            "is_completed": True,
            "is_truncated": False,
            "stop_condition": "stop",
            "metrics": {},
        }
        for s in SAMPLES
    ]
    return write_jsonl(folder / "results.jsonl", rows)


def write_verifiers_graph(folder: Path) -> Path:
    """traces.jsonl of verifiers' message graph; the second response's path forks off the first one's prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for s in SAMPLES:
        kept = [place for place, keep in enumerate(s.mask) if keep]
        numbers = {"logprobs": s.sampler, "trainer_logprobs": s.trainer, "entropies": s.entropy}
        numbers["advantages"] = [s.advantage] * len(s.response)
        asked = {"parent": None, "message": {"role": "user"}, "sampled": False}
        asked |= {"token_ids": s.prompt, "mask": [False] * len(s.prompt), "logprobs": []}
        told = {"parent": 0, "message": {"role": "assistant"}, "sampled": True}
        told |= {"token_ids": s.response, "mask": s.mask}
        told |= {name: [values[place] for place in kept] for name, values in numbers.items()}
        rows.append(
            {
                "version": 1,
                "id": f"{len(rows)}",
                "task": {"type": "Math", "data": {}, "key": f"task-{s.group}", "hash": None},
                "agent": {"name": "agent"},
                "nodes": [asked, told],
                "calls": [{"node": 1, "sampling": {"temperature": 0.5}}],
                "rewards": {"right": {"score": s.reward, "weight": 0.5}, "form": {"score": 0.5 * s.reward}},
                "metrics": {},
            }
        )
    return write_jsonl(folder / "traces.jsonl", rows)


def write_prime_rl_traces(folder: Path, *, step: int = 3, chunked: bool = False) -> Path:
    """prime-rl's traces: an episode per response, and annotations of the orchestrator and of the trainer.

    chunked: numbered files, that of the stream sealed, with an index beside; returns the folder.
    """
    traces = [json.loads(line) for line in write_verifiers_graph(folder / "of").read_text().splitlines()]
    episodes, trained, credited = [], [], []
    for trace, s in zip(traces, SAMPLES, strict=True):
        for name in ("trainer_logprobs", "entropies", "advantages"):
            trace["nodes"][1].pop(name)
        episode = {
            "id": f"e{trace['id']}",
            "env": {"id": "math"},
            "task": trace["task"],
            "group": {"id": f"g{s.group}"},
        }
        run = {"type": "train", "id": "run", "work": {"type": "train", "step": step}}
        episodes.append(episode | {"run": run, "ok": True, "errors": [], "traces": [trace]})
        ahead = [None] * len(s.prompt)
        kept = {name: [v if m else None for v, m in zip(values, s.mask, strict=True)]
                for name, values in (("trainer_logprobs", s.trainer), ("entropies", s.entropy))}  # fmt: skip
        branch = {"index": 0} | {name: ahead + values for name, values in kept.items()}
        trained.append({"version": 1, "trace_id": trace["id"], "info": {}, "branches": [branch]})
        branch = {"index": 0, "advantages": ahead + [s.advantage] * len(s.response)}
        credited.append(
            {"version": 1, "trace_id": trace["id"], "info": {"advantage": s.advantage}, "branches": [branch]}
        )
    out = folder / "traces"
    if not chunked:
        write_jsonl(out / "stream.jsonl", episodes)
    else:
        lines = [json.dumps(episode) + "\n" for episode in episodes]
        (out / "stream").mkdir(parents=True)
        with pa.output_stream(str(out / "stream" / "00000.jsonl.zst"), compression="zstd") as sealed:
            sealed.write("".join(lines[:2]).encode())
        (out / "stream" / "00001.jsonl").write_text("".join(lines[2:]))
        write_jsonl(out / "stream.index.jsonl", [{"line": 1, "id": "e0", "chunk": 0, "offset": 0}])
    end = "/00000.jsonl" if chunked else ".jsonl"
    write_jsonl(out / f"annotations/trainer{end}", trained)
    write_jsonl(out / f"annotations/orchestrator{end}", credited)
    return out


def run_trl(model: Path, folder: Path, *, conversational: bool, steps: int = 2) -> list[dict[str, Any]]:
    """Train with TRL's own GRPOTrainer, which writes its log below `folder`; returns what it sampled, by step.

    Each entry: `step`, `prompt_ids` and `completion_ids` (lists of lists, without padding) and `advantages`.
    """
    import trl
    from datasets import Dataset

    sampled = []

    class Recording(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            sampled.append({"step": self.state.global_step + 1, "advantages": out["advantages"].tolist()})
            for name in ("prompt", "completion"):
                pairs = zip(out[f"{name}_ids"], out[f"{name}_mask"].bool(), strict=True)
                sampled[-1][f"{name}_ids"] = [ids[mask].tolist() for ids, mask in pairs]
            return out

    def reward(completions: list, **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [float(len(set(t.split()))) for t in texts]

    prompts = [[4, 5, 6], [11, 12], [20, 21, 22], [30]]
    settings = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=6,
        max_steps=steps,
        logging_steps=1,
        log_completions=True,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        seed=0,
    )
    data = Dataset.from_list([{"prompt": chat(p) if conversational else text(p)} for p in prompts])
    Recording(model=str(model), reward_funcs=reward, args=settings, train_dataset=data).train()
    return sampled
