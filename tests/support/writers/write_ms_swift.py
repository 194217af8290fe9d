"""ms-swift's own completions.jsonl: its GRPO trainer trains a tiny model and writes its log.

Package: ms-swift 4.6.0 (peft below 0.21; the package msgspec, which it imports and does not ask for). Called:
`swift.rlhf_main`, whose trainer calls `_log_rollout` and `log`. `truth.json` beside the log says what the trainer held:
ids and advantage of each completion. `evaluated`: it evaluates at the second step; `repeated`: two steps are taken on
each generation.

    PYTHONPATH=tests python tests/support/writers/write_ms_swift.py OUT trained|evaluated|repeated
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from support.words import BOS, EOS, PAD, UNK, VOCAB, make_tokenizer
from swift import rlhf_main
from swift.rewards import ORM, orms
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

PROMPTS = [[4, 5, 6], [11, 12], [20, 21, 22], [30]]
MORE = {
    "trained": ["--max_steps", "2"],
    "evaluated": ["--max_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2"],
    "repeated": ["--max_steps", "4", "--num_iterations", "2"],
}


class Distinct(ORM):
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]


def main(out: Path, kind: str) -> None:
    truth: list[dict[str, Any]] = []

    def record(self: GRPOTrainer, samples: list[Any], _log: Any = GRPOTrainer._log_rollout) -> None:
        _log(self, samples)
        if self.model.training:
            for sample in samples:
                prompt = self.template.encode({"messages": sample.messages[:-1]})["input_ids"]
                known = {"step": self.state.global_step + 1, "prompt_ids": prompt}
                truth.append(known | {"response_ids": sample.response_token_ids, "sample": sample})

    GRPOTrainer._log_rollout = record
    orms["distinct"] = Distinct
    make_model().save_pretrained(out / "model")
    tokenizer = make_tokenizer(chat=True)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(out / "model")
    texts = [" ".join(f"w{i}" for i in prompt) for prompt in PROMPTS]
    rows = [{"messages": [{"role": "user", "content": text}], "solution": "42"} for text in texts]
    (out / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "rlhf_type": "grpo",
        "model": out / "model",
        "model_type": "llama",
        "template": "dummy",
        "reward_funcs": "distinct",
        "dataset": out / "data.jsonl",
        "val_dataset": out / "data.jsonl",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "max_length": 32,
        "logging_steps": 1,
        "log_completions": "true",
        "output_dir": out / "run",
        "add_version": "false",
        "report_to": "none",
        "torch_dtype": "float32",
        "bf16": "false",
        "use_cpu": "true",
        "tuner_type": "full",
        "save_strategy": "no",
        "eval_strategy": "no",
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "load_from_cache_file": "false",
    }
    flags = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    rlhf_main([*flags, *MORE[kind]])
    shutil.copy(out / "run" / "completions.jsonl", out)
    for row in truth:
        row["advantage"] = float(row.pop("sample").advantages)
    lines = ",\n".join(json.dumps(row) for row in truth)
    (out / "truth.json").write_text(f"[\n{lines}\n]\n")
    for folder in ("run", "model"):
        shutil.rmtree(out / folder)
    (out / "data.jsonl").unlink()


def make_model() -> transformers.LlamaForCausalLM:
    """A random model that now and then ends at once, and never samples an unknown word."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
        model.lm_head.weight[EOS] *= 4
        model.lm_head.weight[UNK] = 0
    return model


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main(Path(sys.argv[1]), sys.argv[2])
