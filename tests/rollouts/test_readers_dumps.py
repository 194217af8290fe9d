"""Variations of trainers' dumps, written by hand in their layouts: what they say is read, and mistakes are named."""

from __future__ import annotations

import gzip
import json
import math
import pickle
from pathlib import Path

import pandas as pd
import pytest
import torch
from support import dumps
from support.dumps import SAMPLES
from support.policies import BOS, CONTEXT, VOCAB, make_policy, make_tokenizer, save_checkpoint, write_jsonl
from support.refusals import refused

from gradscope import load_policy
from gradscope.cli import main
from gradscope.policy import Policy
from gradscope.rollouts import read_dump, read_rollouts, rollouts_hash


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


def values(dump, tensor, row) -> list[float]:
    """What a tensor says of the response's tokens, dropped ones too."""
    start = int(dump.batch.response_start[row])
    return tensor[row, start : start + len(SAMPLES[row].response)].tolist()


@pytest.mark.parametrize("chunked", [False, True])
def test_prime_rls_traces_and_their_annotations_are_one(tmp_path, chunked):
    dump = read_dump(dumps.write_prime_rl_traces(tmp_path, chunked=chunked))
    graph = read_dump(dumps.write_verifiers_graph(tmp_path / "graph"))
    assert dump.format == "prime_rl_traces" and dump.steps.tolist() == [3] * 4
    assert torch.equal(dump.batch.input_ids, graph.batch.input_ids)
    assert torch.equal(dump.batch.response_mask, graph.batch.response_mask)
    assert dump.batch.group_ids.tolist() == graph.batch.group_ids.tolist()
    for name in ("advantages", "old_logprobs", "sampler_logprobs", "rewards"):
        torch.testing.assert_close(getattr(dump.batch, name), getattr(graph.batch, name), equal_nan=True)


def test_prime_rls_traces_that_were_not_trained_are_left_out_and_the_newest_annotation_counts(tmp_path):
    """Here its advantages, twice those of the first."""
    out = dumps.write_prime_rl_traces(tmp_path)
    trainer = out / "annotations" / "trainer.jsonl"
    lines = trainer.read_text().splitlines()[:2]
    newer = json.loads(lines[1])
    newer["branches"][0]["advantages"] = [
        None if v is None else 2 * SAMPLES[1].advantage for v in newer["branches"][0]["trainer_logprobs"]
    ]
    trainer.write_text("\n".join([*lines, json.dumps(newer)]))
    stream = [json.loads(line) for line in (out / "stream.jsonl").read_text().splitlines()]
    stream.append(stream[0] | {"run": {"type": "eval", "id": "run"}})
    write_jsonl(out / "stream.jsonl", stream)
    dump = read_dump(out)
    assert len(dump.batch) == 2
    assert any("2 of 5 rows left out: no annotation" in note for note in dump.notes)
    assert any("1 of 5 rows left out: they are from an evaluation" in note for note in dump.notes)
    pairs = zip(values(dump, dump.batch.advantages, 1), SAMPLES[1].mask, strict=True)
    assert all(found == 2 * SAMPLES[1].advantage for found, keep in pairs if keep)


@pytest.mark.parametrize(
    ("file", "change_of", "named"),
    [
        ("stream", lambda row: row | {"traces": 3}, "traces"),
        ("stream", lambda row: row | {"run": {"work": {"step": 1.5}}}, "step"),
        ("annotations/trainer", lambda row: row | {"branches": {}}, "branches"),
        ("annotations/trainer", lambda row: row | {"branches": [{"index": 4}]}, "branch 4"),
        (
            "annotations/trainer",
            lambda row: row | {"branches": [{"index": 0, "trainer_logprobs": "x"}]},
            "trainer_logprobs",
        ),
    ],
)
def test_traces_and_annotations_that_do_not_fit_are_refused(tmp_path, file, change_of, named):
    path = dumps.write_prime_rl_traces(tmp_path) / f"{file}.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(change_of(json.loads(lines[0]))), *lines[1:]]))
    with refused(named):
        read_dump(tmp_path / "traces")


def test_a_sealed_file_that_is_broken_is_refused(tmp_path):
    path = dumps.write_prime_rl_traces(tmp_path, chunked=True) / "stream" / "00000.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-20] + b"x" * 20)
    with refused("00000.jsonl.zst"):
        read_dump(tmp_path / "traces")


def test_lines_packed_by_gzip_are_read_beside_plain_ones(tmp_path, policy):
    paths = [dumps.write_verl(tmp_path, step=step) for step in (3, 4)]
    wanted = read_dump(tmp_path, policy)
    content = paths[0].read_bytes().splitlines(keepends=True)
    paths[0].with_suffix(".jsonl.gz").write_bytes(b"".join(map(gzip.compress, content)))  # appended to, line by line
    paths[0].unlink()
    found = read_dump(tmp_path, policy)
    assert found.steps.tolist() == wanted.steps.tolist() == [3] * 4 + [4] * 4
    assert torch.equal(found.batch.input_ids, wanted.batch.input_ids)
    dumps.write_verl(tmp_path, step=3)  # packed, and not yet deleted
    assert len(read_dump(tmp_path, policy).batch) == len(wanted.batch)
    packed = paths[0].with_suffix(".jsonl.gz")
    packed.write_bytes(packed.read_bytes()[:-20])
    with refused("3.jsonl.gz"):
        read_dump(packed, policy)


@pytest.mark.parametrize(("name", "column"), [("trl", "advantage"), ("verl", "score"), ("open_instruct", "reward")])
def test_a_format_is_told_where_the_first_row_lacks_a_value(tmp_path, policy, name, column):
    path = getattr(dumps, f"write_{name}")(tmp_path)
    rows = pd.read_parquet(path).to_dict("records") if path.suffix == ".parquet" else pd.read_json(path, lines=True)
    rows = rows if isinstance(rows, list) else rows.to_dict("records")
    rows[0][column] = None
    path = write_jsonl(tmp_path / "log.jsonl", rows)
    for asked in (None, name):
        dump = read_dump(path, policy, format=asked)
        assert dump.format == name and len(dump.batch) == len(SAMPLES) - (column != "reward")


def test_verifiers_graph_has_the_samplers_log_probabilities_and_a_response_for_each_path(tmp_path):
    path = dumps.write_verifiers_graph(tmp_path)
    dump = read_dump(path)
    for row, sample in enumerate(SAMPLES):
        own = [value if keep else math.nan for value, keep in zip(sample.sampler, sample.mask, strict=True)]
        assert values(dump, dump.batch.sampler_logprobs, row) == pytest.approx(own, rel=0, nan_ok=True)
    trace = json.loads(path.read_text().splitlines()[0])
    asked, told = trace["nodes"]
    second = told | {"token_ids": [9], "mask": [True]} | {name: [-1.0] for name in ("logprobs", "trainer_logprobs")}
    tool = asked | {"parent": 1, "token_ids": [21, 22], "mask": [False, False]}
    last = second | {"parent": 3, "advantages": None, "entropies": None}
    forked = read_dump(
        change(path, 0, nodes=[asked, told, second | {"advantages": [2.0], "entropies": [1.0]}, tool, last])
    )
    ids = [forked.batch.sequence(row)[0].tolist() for row in range(2)]
    assert ids == [[4, 5, 6, 9], [4, 5, 6, 7, 8, 21, 22, 9]]
    assert values(forked, forked.batch.advantages, 1)[:2] == [0.5, 0.5] and forked.batch.advantages[1, 7] == 0.0
    assert forked.batch.sequence(1)[1].tolist() == [3, 4, 7] and forked.batch.group_ids.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "change_of",
    [
        lambda t: t | {"nodes": []},
        lambda t: t | {"task": {"type": "Math"}},
        lambda t: t | {"nodes": [t["nodes"][0], t["nodes"][1] | {"parent": 5}]},
        lambda t: t | {"nodes": [t["nodes"][0], t["nodes"][1] | {"mask": [True]}]},
        lambda t: t | {"nodes": [t["nodes"][0], t["nodes"][1] | {"logprobs": [-1.0]}]},
    ],
)
def test_a_message_graph_that_does_not_fit_together_is_refused(tmp_path, change_of):
    path = dumps.write_verifiers_graph(tmp_path)
    trace = change_of(json.loads(path.read_text().splitlines()[0]))
    with refused():
        read_dump(change(path, 0, **trace))


def test_slimes_samples_of_two_ranks_count_once_and_untrained_ones_not(tmp_path):
    dumps.write_slime(tmp_path)
    for rank in (0, 1):
        samples = [s for s in dumps.slime_train_samples() if s["sample_index"] > 1]
        torch.save({"rollout_id": 3, "rank": rank, "samples": samples}, tmp_path / f"train_3_{rank}.pt")
    dump = read_dump(tmp_path)
    assert dump.batch.rewards.tolist() == [SAMPLES[3].reward, SAMPLES[2].reward]
    assert any(note.startswith("2 of 6 rows left out: another rank") for note in dump.notes)
    assert any(note.startswith("2 of 6 rows left out: they have no train data") for note in dump.notes)


def test_slimes_samples_that_were_masked_or_are_empty_are_left_out(tmp_path):
    samples = dumps.slime_rollout_samples()
    samples[0] |= {"loss_mask": [0, 0]}
    samples[1] |= {"response_length": 0, "loss_mask": [], "rollout_log_probs": []}
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "r.pt")
    dump = read_dump(tmp_path / "r.pt")
    assert dump.batch.rewards.tolist() == [s.reward for s in SAMPLES[2:]]
    assert sum(note.startswith("1 of 4 rows left out") for note in dump.notes) == 2


def test_without_the_trainers_own_the_samplers_log_probabilities_are_the_denominator(tmp_path):
    path = dumps.write_nemo_rl(tmp_path)
    for row in range(len(SAMPLES)):
        change(path, row, prev_logprobs=None)
    dump = read_dump(path)
    for row, sample in enumerate(SAMPLES):
        assert values(dump, dump.batch.old_logprobs, row) == sample.sampler
    assert dump.batch.sampler_logprobs is None


def test_the_temperature_of_roll_may_stand_in_its_generation_config(policy, tmp_path):
    settings = [json.dumps({"request_id": "a", "generation_config": {"temperature": 0.75}})] * len(SAMPLES)
    path = change(dumps.write_roll(tmp_path), 0, sampling_params=settings)
    assert read_dump(path, policy).batch.temperature.tolist() == [0.75] * 4
    dump = read_dump(change(path, 0, sampling_params=["no JSON"] * len(SAMPLES)), policy)
    assert dump.batch.temperature.tolist() == [1.0] * 4
    assert any("the sampling temperature is not in the log" in note for note in dump.notes)


def test_a_templated_prompt_gets_its_first_token_once(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    model = make_policy("llama")
    policy = Policy(model.model, tokenizer, model.blocks_name)
    path = change(dumps.write_ms_swift(tmp_path), 0, prompt=["<bos> w4", "w4", "<bos> w5", "w5"])
    batch = read_rollouts(path, policy)
    assert [batch.input_ids[row, :2].tolist() for row in range(4)] == [[BOS, 4], [BOS, 4], [BOS, 5], [BOS, 5]]
    assert batch.response_start.tolist() == [2] * 4


def test_slimes_train_data_of_other_tokens_are_refused(tmp_path):
    samples = dumps.slime_train_samples()
    samples[0]["tokens"] = samples[0]["tokens"] + 1
    torch.save({"rollout_id": 3, "samples": samples}, dumps.write_slime(tmp_path) / "train_3_0.pt")
    with refused("tokens", "train_3_0.pt"):
        read_dump(tmp_path)


def test_a_step_is_kept_and_groups_of_other_steps_are_others(policy, tmp_path):
    for step in (2, 10, 3):
        dumps.write_verl(tmp_path, step=step)
    dump = read_dump(tmp_path, policy)
    assert dump.steps.tolist() == [2] * 4 + [3] * 4 + [10] * 4  # files in the order of their numbers
    assert dump.batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert read_dump(tmp_path, policy, step=10).steps.tolist() == [10] * 4
    with refused("step 4"):
        read_dump(tmp_path, policy, step=4)


def test_all_ranks_and_steps_of_a_folder_are_read(tmp_path):
    for step, rank in ((1, 0), (1, 1), (2, 0)):
        path = dumps.write_prime_rl(tmp_path, step=step, rank=rank)
    assert len(read_dump(path.parents[1]).batch) == 12
    assert len(read_dump(path.parents[1] / "step_1").batch) == 8


def test_a_step_without_its_marker_is_refused_and_left_out_beside_finished_ones(tmp_path):
    unfinished = dumps.write_prime_rl(tmp_path, step=4, stable=False)
    for path in (unfinished, unfinished.parent, unfinished.parents[1]):
        with refused("rank_0.jsonl"):
            read_dump(path)
    dumps.write_prime_rl(tmp_path, step=3)
    dump = read_dump(unfinished.parents[1])
    assert dump.steps.tolist() == [3] * 4
    assert any(note.startswith("1 unfinished files left out") for note in dump.notes)


def test_formats_mixed_in_a_folder_are_refused_with_a_file_of_each(policy, tmp_path):
    dumps.write_verl(tmp_path)
    dumps.write_nemo_rl(tmp_path)
    with refused("3.jsonl", "verl", "train_data_step3.jsonl", "nemo_rl"):
        read_dump(tmp_path, policy)


UNKNOWN = {
    "verl without its score": ({"input": "a", "output": "b", "gts": "c"}, ("verl", "score")),
    "prime-rl without its mask": (
        {"token_ids": [1], "inference_logprobs": [0], "entropy": [1], "env_name": "a"},
        ("prime_rl", "loss_mask"),
    ),
    "nothing known": ({"foo": 1, "bar": 2}, ("native", "trl")),
}


@pytest.mark.parametrize(("row", "named"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_columns_are_named_with_the_nearest_format(tmp_path, row, named):
    with refused(*named, *row):
        read_dump(write_jsonl(tmp_path / "r.jsonl", [row]))


def change(path: Path, row: int, **columns) -> Path:
    """The JSONL file with other columns in one row; None takes a column away."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[row] |= columns
    return write_jsonl(path, rows)


EMPTY = {
    "trl": lambda folder: dumps.write_trl(
        folder, samples=[*SAMPLES[:3], dumps.Sample([11, 12], [], 1, 0.0, 0.25, [], [], [], [])]
    ),
    "verl": lambda folder: change(dumps.write_verl(folder), 3, output=""),
    "open_instruct": lambda folder: change(dumps.write_open_instruct(folder), 3, response_tokens=[], logprobs=[]),
    "verifiers": lambda folder: change(dumps.write_verifiers(folder), 3, completion=[]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_responses_of_a_dump_are_left_out_and_counted(policy, tmp_path, name):
    dump = read_dump(EMPTY[name](tmp_path), policy)
    assert len(dump.batch) == 3
    assert "1 of 4 rows left out: the response is empty" in dump.notes


def test_samples_that_the_trainer_masked_out_are_left_out_and_counted(tmp_path):
    path = change(dumps.write_nemo_rl(tmp_path), 1, sample_loss_mask=0.0)
    dump = read_dump(change(path, 2, token_loss_mask=[0] * 6))
    assert dump.batch.rewards.tolist() == [1.0, -1.0]
    assert "2 of 4 rows left out: the trainer's mask drops all of their tokens" in dump.notes


HOSTILE = {
    "advantage beyond float32": {"advantages": [1e39] * 5},
    "a probability": {"inference_logprobs": [0.9] * 5},
    "short array": {"advantages": [1.0]},
    "text among numbers": {"advantages": ["a"] * 5},
    "id beyond the vocabulary": {"token_ids": [4, 5, 6, 7, VOCAB]},
    "no prompt": {"loss_mask": [True] * 5},
    "mask of twos": {"loss_mask": [0, 0, 0, 1, 2]},
    "step beyond 64 bits": {"step": 2**63},
    "step of an odd digit": {"step": "²"},
    "no ids": {"token_ids": None},
    "longer than the context": {
        "token_ids": [4] * (CONTEXT + 1),
        "loss_mask": [False] + [True] * CONTEXT,
        **{name: [-1.0] * (CONTEXT + 1) for name in ("advantages", "inference_logprobs", "trainer_logprobs")},
        **{name: [0.0] * (CONTEXT + 1) for name in ("entropy", "is_masked")},
    },
}


@pytest.mark.parametrize("columns", HOSTILE.values(), ids=HOSTILE)
def test_a_fault_is_named_by_file_row_and_the_dumps_own_column(policy, tmp_path, columns):
    path = change(dumps.write_prime_rl(tmp_path), 0, **columns)
    # The first row is also the one that tells the format: a fault elsewhere must read the same.
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    own = columns if len(columns) == 1 and "loss_mask" not in columns else ()
    if max(columns.get("token_ids") or [0]) < VOCAB and len(columns.get("token_ids") or []) <= CONTEXT:
        with refused(f"{path}, row 1 (line 2)", *own):
            read_dump(path, policy)
        return
    [note] = [note for note in read_dump(path, policy).notes if note.kind == "left-out"]  # others can be measured
    assert f"{path}, row 1 (line 2)" in note and all(name in note for name in own)


def test_a_chat_that_the_trainer_opened_anew_is_refused(policy, tmp_path):
    path = change(dumps.write_verifiers(tmp_path), 1, prompt=[*dumps.chat([4]), *dumps.said([5])])
    with refused("row 1"):
        read_dump(path, policy)


def test_the_commands_take_a_folder_of_dumps_and_say_what_it_lost(tmp_path, capsys):
    model = save_checkpoint(tmp_path / "model", "llama")
    folder, out = dumps.write_verl(tmp_path / "run").parent, tmp_path / "out"
    main(["measure", str(model), str(folder), "--out", str(out), "--format", "verl", "--no-figures"])
    printed = capsys.readouterr().out
    notes = read_dump(folder, load_policy(model)).notes
    assert all(f"note: {note}" in printed for note in notes)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["rollouts"]["format"] == "verl" and manifest["rollouts"]["notes"] == list(notes)
    table = pd.read_parquet(out / "tokens.parquet")
    assert table["token_id"].tolist() == [i for s in SAMPLES for i in s.response]
    for command in ("measure", "compare"):
        with pytest.raises(SystemExit) as stopped:
            main([command, str(model), str(folder), "--out", str(tmp_path / command), "--format", "trl"])
        assert stopped.value.code == 2
        assert "no `advantage`, which every record of the format trl has" in capsys.readouterr().err


def test_the_hash_of_a_folder_changes_with_a_file_and_a_name(tmp_path):
    dumps.write_verl(tmp_path, step=1)
    first = rollouts_hash(tmp_path)
    (tmp_path / "1.jsonl").rename(tmp_path / "2.jsonl")
    second = rollouts_hash(tmp_path)
    change(tmp_path / "2.jsonl", 0, score=0.25)
    assert len({first, second, rollouts_hash(tmp_path)}) == 3


class Runs:
    """Would leave a trace if a pickle of it were loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", ["metadata", "alone", "beside"])
def test_nothing_in_skyrls_pickle_is_run(tmp_path, where):
    trace = tmp_path / "trace"
    path = dumps.write_skyrl(tmp_path, odd=Runs(trace) if where == "metadata" else None)
    if where == "alone":
        path.write_bytes(pickle.dumps(Runs(trace)))
    if where == "beside":  # an instruction that asks for things by a number
        path.write_bytes(b"\x80\x04\x82\x01.")
    with refused(path.name):
        read_dump(path)
    assert not trace.exists()


def test_skyrls_own_padding_and_masked_rows_are_no_responses(tmp_path):
    dump = read_dump(dumps.write_skyrl(tmp_path, pad=3))
    assert len(dump.batch) == len(SAMPLES)
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [3]


EXPERTS = {"format": "numpy", "data": bytes(5 * 6 * 2 * 2), "shape": (5, 6, 2, 2), "dtype": "uint8"}


def test_batches_of_skyrl_with_images_leave_nothing_to_measure(tmp_path):
    with refused("4 of 5", "1 of 5"):
        read_dump(dumps.write_skyrl(tmp_path, pixel_values={"format": "tensor_list", "items": []}))


def test_experts_that_skyrls_sampler_chose_are_told(tmp_path):
    for routed in (True, False):
        notes = read_dump(dumps.write_skyrl(tmp_path, **({"rollout_expert_indices": EXPERTS} if routed else {}))).notes
        assert [note.startswith("4 of 4 responses") for note in notes if "experts" in note] == [True] * routed
