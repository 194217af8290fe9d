"""Logs as their trainers write them, by writers made after the trainers' sources: what is asked of every reader.

The truth is tests/support/writers/sampled.py: every expected number is made of it here, by the rule of the trainer, in
plain Python. fixtures/ holds what the writers wrote; `make test-all` runs them again and compares.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev, stdev

import pandas as pd
import pytest
import torch
from support.policies import BOS, make_policy, make_tokenizer, save_checkpoint
from support.refusals import refused
from support.writers import sampled
from support.writers.environments import python_with, write
from support.writers.sampled import EOS, STEPS, Sample
from support.writers.write_nemo_rl import write_nemo_rl
from support.writers.write_open_instruct import write_open_instruct
from support.writers.write_prime_rl import write_prime_rl
from support.writers.write_rl_logging_board import write_rl_logging_board
from support.writers.write_rllm import write_rllm
from support.writers.write_roll import write_roll
from support.writers.write_slime import miles_sample, save, slime_sample, write_miles, write_slime

from gradscope.cli import main
from gradscope.objective import resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import READERS, list_files, read_checkpoint_dump, read_dump, read_rollouts

FIXTURES = Path(__file__).parent / "fixtures"


def grpo(rewards: list[float], reward: float) -> float:
    return (reward - fmean(rewards)) / (stdev(rewards) + 1e-6)


def population(rewards: list[float], reward: float) -> float:
    return (reward - fmean(rewards)) / (pstdev(rewards) + 1e-8)


def centred(rewards: list[float], reward: float) -> float:
    return reward - fmean(rewards)


@dataclass(frozen=True)
class Log:
    """A log, and what is true of it by its trainer's rules."""

    path: str
    first: int
    """The number of its first step."""
    samples_of_initial: int
    """The number of the step that the initial weights, a checkpoint of step 0, sampled."""
    left_out: list[int]
    """Counts of the notes on what is left out."""
    advantage: Callable[[list[float], float], float] = grpo
    whose: str | None = "sampler"
    """Whose log-probabilities the ratio is to; None: there are none."""
    mask: bool = True
    """Whether a tool's output is dropped."""
    keeps: Callable[[Sample], bool] = lambda sample: bool(sample.response) and not sample.dropped
    counts: Callable[[Sample], bool] = lambda sample: True
    """Whose reward counts in its group."""
    temperature: float = 1.0
    steps: int = 2
    text: bool = False


LOGS = {
    "slime": Log("slime", 0, 1, [1, 1, 4], whose="trainer"),
    "slime, rollout data": Log("slime/rollout_data", 0, 1, [1, 1, 4]),
    "slime, train data": Log("slime/train_data", 0, 1, [1, 1], whose="trainer"),
    "miles": Log("miles", 0, 1, [1, 1, 6, 4], whose="trainer"),
    "miles, rollout data": Log("miles/rollout_data", 0, 1, [1, 1, 4]),
    "miles, train data": Log("miles/train_data", 0, 1, [1, 1, 6], whose="trainer"),
    "nemo_rl": Log("nemo_rl", 1, 1, [2, 4], whose="trainer"),
    "open_instruct": Log("open_instruct", 0, 0, [], population, mask=False, keeps=lambda sample: True),
    "prime_rl": Log("prime_rl/token_exports", 1, 1, [1], centred),
    "roll": Log("roll", 0, 1, [1], whose=None, mask=False, keeps=lambda sample: bool(sample.response),
                temperature=0.75, text=True),
    "prime_rl_traces, rollouts": Log("traces/rollouts", 1, 1, [], centred, temperature=0.75, steps=1),
    "prime_rl_traces": Log("traces/traces", 1, 1, [1, 1], centred, temperature=0.75),
    "verifiers_graph": Log("traces/eval", 1, 1, [1, 1], centred, temperature=0.75, steps=1),
    "verifiers": Log("verifiers", 1, 1, [1, 1], whose=None, mask=False, steps=1, text=True,
                     keeps=lambda sample: bool(sample.response) and sample.end == "stop",
                     counts=lambda sample: sample.end == "stop"),  # the other one has an error
    "torchtitan": Log("torchtitan-0.3.0-ids", 0, 0, [3, 1], centred, keeps=lambda sample: bool(sample.response)),
    "areal": Log("areal-1.0.4/rollout", 0, 1, [1], whose=None, counts=lambda sample: bool(sample.response),
                 keeps=lambda sample: bool(sample.response) and all(sample.mask)),
    "rllm": Log("rllm/episodes", 1, 1, [1], whose=None, mask=False, text=True,
                keeps=lambda sample: bool(sample.response)),
    "rl_logging_board": Log("rl_logging_board", 1, 1, [1], whose="trainer", mask=False,
                            keeps=lambda sample: bool(sample.response)),
}  # fmt: skip
READ = pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


@dataclass(frozen=True)
class Told:
    """What is expected of a response."""

    step: int
    group: int
    sample: Sample
    rewards: list[float]


def expected(log: Log) -> dict[tuple[int, ...], Told]:
    """The responses that are to be read, by prompt and response."""
    told = {}
    for step, groups in enumerate(STEPS[: log.steps]):
        for number, group in enumerate(groups):
            rewards = [sample.reward for sample in group if log.counts(sample)]
            for sample in filter(log.keeps, group):
                if log.path == "prime_rl/token_exports" and sample.response == [36, 37, EOS]:
                    continue  # trained by cross-entropy
                response = sample.response or [EOS]
                prompt = [BOS, *sample.prompt, BOS] if log.text else sample.prompt
                response = [token for token in response if token != EOS] if log.text else response
                told[(*prompt, *response)] = Told(step + log.first, 2 * step + number, sample, rewards)
    return told


def read(log: Log, policy: Policy) -> list[tuple[int, Told, list[int], list[int]]]:
    """(row, what is expected of it, its ids, indices of its kept tokens) of every response; all are there."""
    dump, wanted, found = read_dump(FIXTURES / log.path, policy), expected(log), []
    for row in range(len(dump.batch)):
        ids, kept = (values.tolist() for values in dump.batch.sequence(row))
        if tuple(ids) in wanted:
            found.append((row, wanted.pop(tuple(ids)), ids, kept))
        else:
            assert log.path == "traces/traces" and {41, 43} & set(ids)  # of a trace that forks: see below
    assert not [told for told in wanted.values() if (told.step, told.sample.response) != (2, [32, 33, 34, EOS])]
    return [(dump.batch, *one) for one in found]


def test_a_log_is_told_by_columns_that_no_other_format_has(policy):
    for name, log in LOGS.items():
        own = name.split(",")[0]
        own = {"miles": "slime", "verifiers_graph": "prime_rl_traces"}.get(own, own)
        told, asked = (read_dump(FIXTURES / log.path, policy, format=form) for form in (None, own))
        assert told.format == own and torch.equal(told.batch.input_ids, asked.batch.input_ids)
        with refused():
            read_dump(FIXTURES / log.path, policy, format="verl")
        for path in list_files(FIXTURES / log.path):
            if path.suffix == ".jsonl":
                first = json.loads(path.read_text().splitlines()[0])
                columns = {name for name, value in first.items() if value is not None}
                assert [form.name for form in READERS.values() if form.needs and form.needs <= columns] in ([own], [])


@READ
def test_a_group_is_the_trainers(log, policy):
    found = read(log, policy)
    groups = {}
    for batch, row, told, _, _ in found:
        groups.setdefault(told.group, set()).add(int(batch.group_ids[row]))
    assert all(len(ids) == 1 for ids in groups.values()) and len(set.union(*groups.values())) == len(groups)
    assert len(groups) == 2 * log.steps


@READ
def test_advantages_are_the_trainers(log, policy):
    """Also where they are made of rewards: those of responses that are left out count in the mean of their group."""
    for batch, row, told, _, kept in read(log, policy):
        advantage = resolve_advantages(batch)[row, kept].tolist()
        wanted = [log.advantage(told.rewards, told.sample.reward)] * len(kept)
        if log.path == "prime_rl/token_exports" and told.sample.response == [32, 33, 34, EOS]:
            wanted[-1] *= 0.5  # its weight in the policy gradient
        assert advantage == pytest.approx(wanted, rel=1e-6, abs=5e-5)  # traces are rounded to 4 decimals


@READ
def test_the_step_is_the_logs_own_and_the_checkpoint_takes_the_one_that_it_sampled(log, policy):
    dump = read_dump(FIXTURES / log.path, policy)
    if log.path in ("verifiers", "traces/eval"):
        assert dump.steps is None
        return
    for batch, row, told, _, _ in read(log, policy):
        assert int(batch.steps[row]) == told.step
    if log.steps == 2:
        own = read_checkpoint_dump(FIXTURES / log.path, policy, 0)
        assert own.steps.unique().tolist() == [log.samples_of_initial]
        assert [note.kind for note in own.notes].count("step") == 1


@READ
def test_tokens_that_nobody_sampled_are_dropped_where_the_log_can_tell(log, policy):
    for _, _, told, ids, kept in read(log, policy):
        length = len([token for token in told.sample.response if token != EOS]) if log.text else None
        mask = told.sample.mask[:length] if log.mask else [1] * len(told.sample.response[:length] or [EOS])
        start = len(ids) - len(mask)
        assert kept == [start + at for at, keep in enumerate(mask) if keep]


@READ
def test_the_ratio_is_to_whom_the_trainer_says(log, policy):
    for batch, row, told, ids, kept in read(log, policy):
        assert batch.temperature[row] == log.temperature
        if log.whose is None:
            assert batch.old_logprobs is None and batch.sampler_logprobs is None
            continue
        for name, whose in (("old_logprobs", log.whose), ("sampler_logprobs", "sampler")):
            values = getattr(batch, name)
            if values is None:  # the only ones that there are: they are the denominator
                assert name == "sampler_logprobs" and (log.whose == "sampler" or log.path == "rl_logging_board")
                continue
            start = len(ids) - len(told.sample.response)
            own = getattr(told.sample, whose) or [math.nan]
            wanted = [own[at - start] if told.sample.response else math.nan for at in kept]
            assert values[row, kept].tolist() == pytest.approx(wanted, nan_ok=True)


@READ
def test_a_prompt_begins_once(log, policy):
    for _, _, told, ids, _ in read(log, policy):
        assert ids[: 1 + log.text].count(BOS) == log.text and (log.text or ids[0] == told.sample.prompt[0])


@READ
def test_who_is_left_out_is_counted(log, policy):
    notes = [note for note in read_dump(FIXTURES / log.path, policy).notes if note.kind == "left-out"]
    assert [int(note.split()[0]) for note in notes] == log.left_out


def test_evaluations_of_slime_alone_leave_nothing_to_measure(policy):
    for trainer in ("slime", "miles"):
        with refused("2 of 2"):
            read_dump(FIXTURES / trainer / "rollout_data" / "eval_0.pt", policy)


@pytest.mark.parametrize("name", ["rollout_eval_7.pt", "eval_7/samples.pt", "eval_7.pt"])
def test_an_evaluation_of_slime_is_told_by_its_files_name(tmp_path, name):
    """Wherever the template has the id; a folder further up is only called so."""
    samples = [slime_sample(sample, 7, at) for at, sample in enumerate(sampled.flat(1))]
    path = tmp_path / "eval_7" / "run" / name
    save({"rollout_id": 7, "samples": samples}, path)
    with refused("6 of 6"):
        read_dump(path)
    trained = tmp_path / "eval_7" / "run" / name.replace("eval_", "")
    save({"rollout_id": 7, "samples": samples}, trained)
    assert len(read_dump(trained).batch) == 6


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_rewards_of_train_data_alone_are_those_of_the_whole_batch(trainer, policy):
    """Each rank of miles has its own samples and the rewards of all of them."""
    found = read(LOGS[f"{trainer}, train data"], policy)
    for batch, row, told, _, _ in found:
        assert float(batch.rewards[row]) == told.sample.reward
    assert len(found) == 10


def test_rewards_of_a_batch_whose_samples_are_not_all_there_are_left_alone(tmp_path, policy):
    for file in (FIXTURES / "miles" / "train_data").glob("*_0.pt"):
        shutil.copy(file, tmp_path)
    batch = read_dump(tmp_path, policy).batch
    assert batch.rewards is None and batch.advantages is not None


def test_prompts_with_images_are_left_out(tmp_path):
    given = [{"images": ["x"], "videos": None}, {}, None, {"images": None, "videos": []}]
    made = [None, None, {"pixels": torch.zeros(2)}, None]
    path = rollouts(tmp_path, multimodal_inputs=given, multimodal_train_inputs=made)
    dump = read_dump(path)
    assert len(dump.batch) == 4
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [2]


def test_a_log_with_the_samplers_experts_is_told(policy):
    for path, words in (("miles", "10 of 10 responses"), ("miles/rollout_data", "10 of 10 responses"), ("slime", None)):
        found = [note for note in read_dump(FIXTURES / path, policy).notes if "experts" in note]
        assert [note.startswith(words) for note in found] == [True] if words else not found


def test_weights_that_lag_behind_are_counted():
    """By slime's weight_versions, and by the policy that prime-rl wrote into an episode."""
    for path, words in (("slime", "2 of 10 responses"), ("miles", "2 of 10 responses"), ("traces/traces", "1 of 11 ")):
        assert [note for note in read_dump(FIXTURES / path).notes if note.startswith(words)]


def test_open_instructs_tool_output_and_its_unsampled_end_are_counted(policy):
    notes = {note.kind: note for note in read_dump(FIXTURES / "open_instruct").notes}
    assert "3 tokens of 1 response," in notes["certain-tokens"]
    assert "1 of 35 tokens" in notes["unknown-values"]


def rollouts(tmp_path: Path, **changes: list) -> Path:
    """One step of slime's rollout data, each sample with its own changes."""
    samples = [slime_sample(sample, 1, at) for at, sample in enumerate(sampled.flat(1))]
    for name, values in changes.items():
        for sample, value in zip(samples, values, strict=False):
            sample[name] = value
    save({"rollout_id": 1, "samples": samples}, tmp_path / "1.pt")
    return tmp_path / "1.pt"


def test_slime_scales_rewards_by_the_whole_step_where_prompts_have_unequal_numbers_of_samples(tmp_path):
    path = rollouts(tmp_path, group_index=[2, 2, 2, 2, 3, 3])
    batch = read_dump(path).batch
    rewards = [sample.reward for sample in sampled.flat(1)]
    wanted = [grpo(rewards, reward) for reward in rewards]
    got = [float(resolve_advantages(batch)[row][batch.response_mask[row]][0]) for row in range(6)]
    assert got == pytest.approx(wanted, rel=1e-6)
    assert batch.group_ids.tolist() == [0, 0, 0, 0, 1, 1]  # prompts stay what they are


def test_samples_of_one_rollout_are_scaled_as_slime_and_as_miles_do(tmp_path):
    """The first two samples are of one rollout, and share its index and its reward."""
    for at, make in enumerate((slime_sample, miles_sample)):
        samples = [make(sample, 1, place) for place, sample in enumerate(sampled.flat(1))]
        samples[1] |= {"index": samples[0]["index"], "rollout_id": 6, "reward": samples[0]["reward"]}
        samples[0]["rollout_id"] = 6
        content = {"rollout_id": 1, "samples": samples} | ({"metadata": {}} if at else {})
        save(content, tmp_path / str(at) / "1.pt")
        batch = read_dump(tmp_path / str(at)).batch
        assert len(batch) == 6 and batch.steps.unique().tolist() == [1]
        rewards = [0.0, 0.0, 1.0, 2.0, 0.0, 1.0]
        scales = [[0.0, 1.0]] * 3 + [[2.0, 0.0, 1.0]] * 3 if at else [rewards] * 6
        wanted = [grpo(scale, reward) for scale, reward in zip(scales, rewards, strict=True)]
        got = [float(resolve_advantages(batch)[row][batch.response_mask[row]][0]) for row in range(6)]
        assert got == pytest.approx(wanted, rel=1e-6)


def test_samples_that_were_aborted_before_they_had_a_reward_are_left_out(tmp_path):
    path = rollouts(tmp_path, status=["aborted", "aborted"], reward=[None, 1.0])
    dump = read_dump(path)
    assert len(dump.batch) == 5
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [1]


def test_a_reward_of_several_parts_is_one_that_is_named(tmp_path, policy):
    path = rollouts(tmp_path, reward=[{"score": sample.reward, "style": 0.25} for sample in sampled.flat(1)])
    with refused("score, style", "--reward-key"):
        read_dump(path)
    assert read_dump(path, reward_key="score").batch.rewards.tolist() == [s.reward for s in sampled.flat(1)]
    assert read_rollouts(path, reward_key="style").rewards.tolist() == [0.25] * 6
    with refused("other"):
        read_dump(path, reward_key="other")


def test_slimes_nucleus_is_told(tmp_path):
    path = rollouts(tmp_path, rollout_top_p_token_offsets=[torch.tensor([0, 1, 2])] * 2)
    assert [note for note in read_dump(path).notes if note.startswith("2 of 6 responses")]


def test_objects_that_no_number_depends_on_do_not_keep_a_file_from_being_read(tmp_path):
    """miles writes dataclasses of its own; a user's metadata may hold anything. Nothing of them is run."""
    witness = tmp_path / "witness"

    class Adapter:
        def __reduce__(self):
            return print, ("run",), {"made": True}

    class Loud:
        def __setstate__(self, state):
            witness.touch()

    Adapter.__module__ = Loud.__module__ = __name__
    globals().update({"Loud": Loud})
    Loud.__qualname__ = "Loud"
    loud = Loud()
    loud.__dict__["held"] = 1
    try:
        path = rollouts(tmp_path, metadata=[{"adapter": Adapter()}, {"loud": loud, "path": Path("x")}])
        dump = read_dump(path)
    finally:
        del globals()["Loud"]
    assert len(dump.batch) == 6 and not witness.exists()


def test_one_part_of_each_sequence_is_refused(tmp_path):
    write_miles(tmp_path)
    path = tmp_path / "train_data" / "0_0.pt"
    content = torch.load(path, weights_only=False) | {"cp_size": 2}
    save(content, path)
    with refused("0_0.pt"):
        read_dump(tmp_path)


def test_a_run_of_nemo_rl_that_forces_the_ratio_to_one_has_no_denominator(tmp_path):
    dump = read_dump(write_nemo_rl(tmp_path, forced=True))
    assert dump.batch.old_logprobs is None
    for row in range(len(dump.batch)):
        assert dump.batch.sampler_logprobs[row][dump.batch.response_mask[row]].lt(0).all()
    assert "on-policy" in [note.kind for note in dump.notes]


def test_what_nemo_rls_sampler_did_not_record_is_unknown(tmp_path):
    path = write_nemo_rl(tmp_path) / "train_data_step2.jsonl"
    lines = path.read_text().splitlines()
    # The fourth token of a response of four: the trainer says -1.125; one that says -.375 may have been certain.
    sample = sampled.flat(1)[3]
    assert sample.trainer[3] == -1.125 and sample.trainer[0] == -0.375
    lines[3] = lines[3].replace("[0.0, 0.0, -0.25, -0.5, -0.75, -1.0", "[0.0, 0.0, 0.0, -0.5, -0.75, 0.0")
    path.write_text("\n".join(lines) + "\n")
    batch = read_dump(path).batch
    values = batch.sampler_logprobs[3][batch.response_mask[3]].tolist()
    assert values[:3] == [0.0, -0.5, -0.75] and math.isnan(values[3])


def test_open_instructs_runs_are_not_mixed_and_a_resumed_step_counts_once(tmp_path):
    folder = write_open_instruct(tmp_path)
    shard = next(folder.glob("*_rollouts_*"))
    lines = shard.read_text().splitlines()
    shard.write_text("\n".join([*lines, *[line.replace('"reward": 0.0', '"reward": 0.5') for line in lines[6:]]]))
    dump = read_dump(folder)
    assert len(dump.batch) == 12 and dump.batch.rewards[6:].tolist() == [0.5, 1.0, 1.0, 2.0, 0.5, 1.0]
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [6]
    shutil.copy(shard, folder / "other__2_rollouts_000000.jsonl")
    with refused():
        read_dump(folder)


def test_a_prompt_index_that_stands_for_two_prompts_is_two_groups(tmp_path):
    """open-instruct counts prompts by place, also where it has dropped truncated responses."""
    folder = write_open_instruct(tmp_path)
    shard = next(folder.glob("*_rollouts_*"))
    lines = shard.read_text().splitlines()
    shard.write_text("\n".join([*lines[:2], lines[3].replace('"prompt_idx": 1', '"prompt_idx": 0')]))
    assert read_dump(folder).batch.group_ids.tolist() == [0, 0, 1]


def test_a_message_that_two_paths_share_is_trained_once():
    """As prime-rl trains it: in the first path that holds it, and as context in the second."""
    dump = read_dump(FIXTURES / "traces" / "traces", step=2)
    paths = []
    for row in range(len(dump.batch)):
        ids, kept = (values.tolist() for values in dump.batch.sequence(row))
        if {41, 43} & set(ids):
            paths.append([ids[at] for at in kept])
    assert paths == [[32, 33, 34, EOS, 41, EOS], [43, EOS]]


def graph(tmp_path: Path, *traces: dict) -> Path:
    """Traces of verifiers' message graph: three of one prompt, each with its own changes."""
    rows = []
    for at, changes in enumerate(traces):
        nodes = [
            {"parent": None, "token_ids": [4, 5], "mask": [False] * 2},
            {"parent": 0, "sampled": True, "token_ids": [7, 8, 2], "mask": [True] * 3, "logprobs": [-0.5] * 3},
        ]
        task = {"type": "Math", "data": {}, "key": "k"}
        row = {"id": str(at), "task": task, "nodes": nodes, "rewards": {"right": {"score": float(at)}}, "ok": True}
        rows.append(json.dumps(row | changes) + "\n")
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(rows))
    return path


def test_traces_that_no_trainer_takes_are_left_out_of_their_group_too(tmp_path):
    """Failed ones, other agents', those without ids, and attempts at compaction that nothing follows."""
    compaction = [
        {"parent": None, "token_ids": [4, 5], "mask": [False] * 2},
        {"parent": 0, "sampled": True, "token_ids": [9, 2], "mask": [True] * 2, "logprobs": [-0.5] * 2,
         "semantic_parents": [{"node": 0, "type": "compaction_attempt"}]},
    ]  # fmt: skip
    plain: dict = {}
    bare = [{"parent": None, "token_ids": [], "mask": []}]
    others = ({"ok": False}, {"agent": {"trainable": False}}, {"nodes": bare}, {"nodes": compaction})
    dump = read_dump(graph(tmp_path, plain, plain, *others))
    assert dump.batch.rewards.tolist() == [0.0, 1.0]
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [1] * 4
    half = 0.5 / (stdev([0.0, 1.0]) + 1e-6)
    advantages = resolve_advantages(dump.batch)
    assert advantages[dump.batch.response_mask].tolist() == pytest.approx([-half] * 3 + [half] * 3)
    resumed = [*compaction, {"parent": None, "token_ids": [4, 6], "mask": [False] * 2},
               {"parent": 2, "sampled": True, "token_ids": [8, 2], "mask": [True] * 2, "logprobs": [-0.5] * 2,
                "semantic_parents": [{"node": 1, "type": "compaction"}]}]  # fmt: skip
    assert len(read_dump(graph(tmp_path, plain, {"nodes": resumed})).batch) == 3


def test_a_reward_that_was_not_scored_does_not_count_and_weights_of_zero_drop_a_token(tmp_path):
    nodes = [
        {"parent": None, "token_ids": [4, 5], "mask": [False] * 2},
        {"parent": 0, "sampled": True, "token_ids": [7, 8, 2], "mask": [True] * 3, "logprobs": [-0.5] * 3,
         "advantages": [1.0] * 3, "loss_weights": {"rl": [1.0, 0.0, 0.5]}},
    ]  # fmt: skip
    rewards = {"right": {"score": 1.0, "weight": 2.0}, "style": None}
    batch = read_dump(graph(tmp_path, {"nodes": nodes, "rewards": rewards})).batch
    assert batch.rewards.tolist() == [2.0]
    assert batch.response_mask[0].tolist() == [False, False, True, False, True]
    assert batch.advantages[0][batch.response_mask[0]].tolist() == [1.0, 0.5]


def test_what_prime_rl_cut_off_is_not_trained(tmp_path):
    """Of the newest layout: the trainer's annotation of a sequence is as long as what it took of it."""
    folder = tmp_path / "traces"
    shutil.copytree(FIXTURES / "traces" / "traces", folder)
    path = folder / "step_1" / "annotations" / "trainer.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["trace_id"] == "trace-0-0"
    stream = lines[0]["branches"][0]
    stream["trainer_logprobs"], stream["entropies"] = stream["trainer_logprobs"][:-1], stream["entropies"][:-1]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = read_dump(folder, step=1).batch
    ids, kept = (values.tolist() for values in batch.sequence(0))
    assert ids == [4, 5, 6, 7, 8, EOS] and kept == [3, 4]


def test_the_commands_read_the_root_of_a_dump(tmp_path, capsys):
    checkpoint = save_checkpoint(tmp_path / "iter_0000000", "llama")
    main(["measure", str(checkpoint), str(FIXTURES / "miles"), "--step", "1", "--temperature", "1.0", "--no-figures",
          "--out", str(tmp_path / "out")])  # fmt: skip
    table = pd.read_parquet(tmp_path / "out" / "tokens.parquet")
    assert table["token_id"].tolist() == [token for at in (0, 2, 4, 1, 3, 5) for token in sampled.flat(1)[at].response]


WRITERS = {
    "slime": write_slime,
    "miles": write_miles,
    "nemo_rl": write_nemo_rl,
    "open_instruct": write_open_instruct,
    "prime_rl": write_prime_rl,
    "rllm": write_rllm,
    "rl_logging_board": write_rl_logging_board,
    "roll": write_roll,
}


@pytest.mark.all
@pytest.mark.parametrize("name", WRITERS)
def test_the_writers_write_the_fixtures(tmp_path, name):
    WRITERS[name](tmp_path / name)
    check_alike(tmp_path, name)


@pytest.mark.all
@pytest.mark.parametrize(("name", "package"), [("traces", "verifiers==0.4.0"), ("verifiers", "verifiers==0.1.14")])
def test_verifiers_own_code_writes_the_fixtures(tmp_path, name, package):
    kind = {"traces": "traces", "verifiers": "results"}[name]
    write(python_with(package), "write_verifiers.py", tmp_path / name, kind)
    check_alike(tmp_path, name)


def check_alike(out: Path, name: str) -> None:
    """What was written below out is the fixture of that name, byte by byte; of torch's files, all that they hold."""
    found = {path.relative_to(out): path for path in (out / name).rglob("*") if path.is_file()}
    kept = {path.relative_to(FIXTURES): path for path in (FIXTURES / name).rglob("*") if path.is_file()}
    assert found.keys() == kept.keys()
    for place, path in found.items():
        if path.suffix == ".pt":
            load = [torch.load(one, weights_only=False) for one in (path, kept[place])]
            assert repr(load[0]) == repr(load[1])
        else:
            assert path.read_bytes() == kept[place].read_bytes()
