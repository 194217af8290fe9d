"""rLLM's episodes: a row per step, text only where it tells what was sampled, ids where they are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import dumps
from support.dumps import SAMPLES, write_rllm
from support.policies import BOS, make_policy, make_tokenizer
from support.refusals import refused

from gradscope.objective import resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import list_files, list_steps, read_dump


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


def step(prompt: list[int], response: list[int], **changes: Any) -> dict[str, Any]:
    own = {"chat_completions": dumps.chat(prompt) + dumps.said(response), "model_response": dumps.text(response)}
    return own | {"thought": "", "reward": 0.0} | changes


def episode(folder: Path, name: str, *steps: dict[str, Any], reward: float | None = 1.0, **changes: Any) -> Path:
    trajectory = {"name": "solver", "uid": "u", "reward": reward, "steps": [*steps]}
    row = {"training_step": 1, "episode_id": name, "is_correct": True, "trajectories": [trajectory]} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"episode_hash_id{name.replace(':', '_')}.json").write_text(json.dumps(row, indent=2))
    return folder


def left_out(dump) -> list[int]:
    return [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"]


def test_each_step_of_a_trajectory_is_a_row_and_its_reward_counts_once(policy, tmp_path):
    episode(tmp_path, "t:0", step([4], [5]), step([4, 5, 6], [7]), step([8], [9]), reward=1.0)
    episode(tmp_path, "t:1", step([4], [6], reward=0.5), reward=None)
    dump = read_dump(tmp_path, policy)
    assert [dump.batch.sequence(row)[0].tolist() for row in (1, 3)] == [[BOS, 4, 5, 6, BOS, 7], [BOS, 4, BOS, 6]]
    assert dump.batch.group_ids.tolist() == [0] * 4 and dump.batch.rewards.tolist() == [1.0, 1.0, 1.0, 0.5]
    half = 0.25 / (0.125**0.5 + 1e-6)  # of 1 and ½: the mean is ¾, the deviation 1/√8
    found = [float(resolve_advantages(dump.batch)[row][dump.batch.response_mask[row]][0]) for row in range(4)]
    assert found == pytest.approx([half, half, half, -half], rel=1e-6)


TOOL = [{"role": "tool", "content": "w9"}, *dumps.said([5])]
CALL = [{"role": "assistant", "content": "w5", "tool_calls": [{}]}]
THOUGHT = [{"role": "assistant", "content": "w5", "reasoning": "w6"}]
PICTURE = [{"role": "user", "content": [{"type": "image"}]}, *dumps.said([5])]


@pytest.mark.parametrize(
    "changes",
    [{"thought": "w9"}, {"model_response": "w9"}, {"chat_completions": []}, {"chat_completions": dumps.chat([4])},
     *({"chat_completions": dumps.chat([4]) + more} for more in (TOOL, CALL, THOUGHT, PICTURE))],
)  # fmt: skip
def test_what_its_text_does_not_tell_is_left_out_and_counts_in_its_group(policy, tmp_path, changes):
    episode(tmp_path, "t:0", step([4], [5], **changes), reward=0.0)
    for number, reward in ((1, 1.0), (2, 0.5)):
        episode(tmp_path, f"t:{number}", step([4], [6]), reward=reward)
    dump = read_dump(tmp_path, policy)
    assert left_out(dump) == [1] and dump.batch.rewards.tolist() == [1.0, 0.5]
    full = 0.5 / (0.5 + 1e-6)  # of 0, 1 and ½
    found = [float(resolve_advantages(dump.batch)[row][dump.batch.response_mask[row]][0]) for row in (0, 1)]
    assert found == pytest.approx([full, 0.0], rel=1e-6, abs=1e-7)


def test_ids_and_log_probabilities_are_taken_where_they_are_there(tmp_path):
    dump = read_dump(write_rllm(tmp_path, ids=True))
    for row, sample in enumerate(SAMPLES):
        assert dump.batch.sequence(row)[0].tolist() == sample.prompt + sample.response
        kept = dump.batch.response_mask[row]
        assert dump.batch.old_logprobs[row][kept].tolist() == sample.sampler
        assert dump.batch.advantages[row][kept].tolist() == [sample.advantage] * len(sample.response)


def test_episodes_of_one_file_are_read_as_those_of_many(tmp_path):
    """As json.dump of `Episode.to_dict` writes them."""
    folder = write_rllm(tmp_path, ids=True)
    rows = [json.loads(path.read_text()) for path in list_files(folder)]
    rows = [{"id": row["episode_id"], "is_correct": True, "trajectories": row["trajectories"]} for row in rows]
    (tmp_path / "episodes.json").write_text(json.dumps(rows, indent=4))
    one, many = read_dump(tmp_path / "episodes.json"), read_dump(folder)
    assert one.steps is None and one.batch.input_ids.tolist() == many.batch.input_ids.tolist()
    assert one.batch.group_ids.tolist() == many.batch.group_ids.tolist() == [0, 0, 1, 1]


def test_names_of_agents_make_groups_of_their_own(policy, tmp_path):
    for number in (0, 1):
        roles = [
            {"name": name, "reward": 1.0, "steps": [step([4], [5])]}
            for name in ("solver", "judge", "default_traj_name")
        ]
        episode(tmp_path, f"t:{number}", trajectories=[*roles, roles[-1]])
    assert read_dump(tmp_path, policy).batch.group_ids.tolist() == [0, 1, 2, 3] * 2


def test_validations_and_episodes_that_failed_are_left_out(policy, tmp_path):
    trained = tmp_path / "episodes" / "train_step_1_epoch_0"
    episode(trained, "t:0", step([4], [5]))
    episode(trained, "t:1", trajectories=[])
    episode(tmp_path / "episodes" / "val_step_1_epoch_0", "t:0", step([4], [5]))
    assert len(list_files(tmp_path / "episodes")) == 2 and list_steps(tmp_path / "episodes").known == (1,)
    assert left_out(read_dump(tmp_path / "episodes", policy)) == [1]
    with refused("1 of 1"):
        read_dump(tmp_path / "episodes" / "val_step_1_epoch_0", policy)


@pytest.mark.parametrize(
    "content", ['{\n "trajectories": ', "[\n 3\n]", '{\n "is_correct": true, "trajectories": 3\n}']
)
def test_a_file_that_is_no_episode_is_named(tmp_path, content):
    path = tmp_path / "episode_1.json"
    path.write_text(content)
    with refused(path.name):
        read_dump(path)
