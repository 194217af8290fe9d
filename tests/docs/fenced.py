"""Fenced blocks of Markdown, and a folder in which what stands in them can be run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support import dumps
from support.adapters import save_adapter
from support.given_text import write_kto_dataset, write_preferences, write_sft_dataset
from support.policies import make_policy, make_responses, make_tokenizer, save_checkpoint, write_jsonl
from support.training import train
from support.verl_stand_ins import write_distillation

FENCE = re.compile(r"^( *)```(\w*)(?: *\{([^}\n]*)\})?[^\n]*\n(.*?)^\1```$", re.M | re.S)
HIDDEN = re.compile(r"(?:^|\s)\.(norun|parse)\b")
CHECKPOINT, STEP, TEMPERATURE = "runs/checkpoint-500", 501, 0.7


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    code: str
    line: int
    mode: str
    """"run", "norun" or, of a shell block, "parse": the command line is read and nothing is done."""
    reason: str
    """Why it is not run."""

    @property
    def commands(self) -> list[list[str]]:
        """The words of each line of a shell block; a backslash joins lines, and # begins a comment."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def read_blocks(path: Path) -> list[Block]:
    """All fenced blocks of a page, in their order."""
    text = path.read_text(encoding="utf-8")
    return [_block(found, text) for found in FENCE.finditer(text)]


def _block(found: re.Match[str], text: str) -> Block:
    attributes = found[3] or ""
    mode = HIDDEN.search(attributes)
    reason = re.search(r'reason="([^"]*)"', attributes)
    line = text[: found.start()].count("\n") + 1
    return Block(found[2], found[4], line, mode[1] if mode else "run", reason[1] if reason else "")


def make_workshop(folder: Path) -> None:
    """All files that the examples name: checkpoints of a tiny policy, its rollouts, and logs of every trainer."""
    base = save_checkpoint(folder / "runs/base", "qwen2", sharpness=5.0)
    policy = make_policy("qwen2", sharpness=5.0)
    train(policy.model, folder / "trained")
    for step in (400, 500):
        checkpoint = shutil.copytree(folder / "trained/checkpoint-3", folder / f"runs/checkpoint-{step}")
        make_tokenizer(chat=True).save_pretrained(checkpoint)
        state = checkpoint / "trainer_state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": step}))
    shutil.rmtree(folder / "trained")
    save_adapter(folder / "runs/adapter", base, r=2, target_modules=["q_proj", "v_proj"])
    policy = replace(policy, model=policy.model.eval())
    write_jsonl(folder / "rollouts.jsonl", (rows := native_rows(policy)))
    write_jsonl(folder / "prompts.jsonl", [{"prompt": "w4 w5 w6"}, {"prompt": "w11 w12"}])
    for step, part in ((401, rows[:16]), (STEP, rows)):
        dumps.write_trl(folder / "runs", step=step, samples=[as_sample(row) for row in part])
    dumps.write_verl(folder / "rollout_data", step=STEP)
    dumps.write_prime_rl(folder / "prime")
    dumps.write_prime_rl_traces(folder / "prime")
    dumps.write_nemo_rl(folder / "nemo")
    dumps.write_open_instruct(folder / "open-instruct")
    dumps.write_slime(folder / "slime", train=True)
    dumps.write_skyrl(folder / "skyrl")
    dumps.write_torchtitan(folder / "torchtitan")
    dumps.write_areal(folder / "areal")
    dumps.write_rllm(folder / "rllm")
    dumps.write_rl_logging_board(folder / "board")
    dumps.write_ms_swift(folder / "swift")
    dumps.write_roll(folder / "roll")
    dumps.write_verifiers(folder / "verifiers")
    dumps.write_verifiers_graph(folder / "graph")
    write_sft_dataset(folder / "sft-dataset.jsonl")
    write_preferences(folder / "preferences")
    write_kto_dataset(folder / "kto.jsonl")
    write_distillation(folder / "distillation", rows)


def native_rows(policy: Any) -> list[dict[str, Any]]:
    """Sixteen prompts with two responses each, one of them better, sampled by the policy itself."""
    lengths = tuple(6 + index % 5 for index in range(32))
    settings = {"lengths": lengths, "prompt_lengths": (5,) * 32, "holes": False, "temperature": TEMPERATURE}
    rows = []
    for index, response in enumerate(make_responses(policy, **settings)):
        row = {"prompt_ids": response.prompt_ids, "response_ids": response.response_ids}
        row |= {"group": response.group, "reward": float(index % 2), "temperature": TEMPERATURE}
        rows.append(row | {"old_logprobs": response.old_logprobs})
    return rows


def as_sample(row: dict[str, Any]) -> dumps.Sample:
    """A row as the logs of trainers are made of it."""
    zeros = [0.0] * len(row["response_ids"])
    credit = row["reward"] - 0.5
    ids = ([max(i, 4) for i in row[name]] for name in ("prompt_ids", "response_ids"))  # words, no special tokens
    return dumps.Sample(*ids, row["group"], row["reward"], credit, zeros, zeros, zeros, [True] * len(zeros))


def run_python(block: Block, path: Path, space: dict[str, Any]) -> None:
    """One block, in the namespace of its page; a traceback names the page's line."""
    exec(compile("\n" * block.line + block.code, str(path), "exec"), space)


def run_shell(block: Block, run: Callable[..., None], parse: Callable[[list[str]], Any], repository: Path) -> None:
    """Each command of gradscope is run, or its words are read; of others it is looked at what they name."""
    for words in block.commands:
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[0] == "gradscope":
            if block.mode == "run":
                run(*words[1:])
            else:
                parse(words[1:])
        elif words[:2] == ["accelerate", "launch"]:
            parse(words[words.index("-m") + 2 :])
        else:
            look_at(words, repository)


def look_at(words: list[str], repository: Path) -> None:
    """A tool that is not run here: whether the repository has what it is given."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.M)
        assert words[1] in targets, words
    elif words[0] == "pip":
        extras = re.findall(r"\[(\w+)\]", " ".join(words))
        known = (repository / "pyproject.toml").read_text()
        assert all(re.search(rf"^{extra} = \[", known, re.M) for extra in extras), words
    elif words[0] == "jupytext":
        assert (repository / words[-1]).is_file(), words
    else:
        raise AssertionError(f"no test knows what to do with {words}")


def seed_everything() -> None:
    """Examples that draw from torch's own generator draw the same."""
    torch.manual_seed(0)
