"""TRL's own log of completions: GRPOTrainer trains a tiny model for two steps and writes its parquet files.

Package: trl, of any version from 0.28 to 1.16. Called: `GRPOTrainer.train`, which calls its `log`. `truth.json` beside
the log says what the trainer held: ids, mask and advantage of each completion.

    PYTHONPATH=tests python tests/support/writers/write_trl.py OUT text|chat|evaluated
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from support.words import BOS, EOS, PAD, VOCAB, make_tokenizer

PROMPTS = [[4, 5, 6], [11, 12], [20, 21, 22], [30]]


def main(out: Path, kind: str) -> None:
    truth: list[dict[str, Any]] = []

    class Recording(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            if not self.model.training:
                return batch
            for row in range(len(batch["prompt_ids"])):
                prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
                ids = batch["completion_ids"][row].tolist()
                end = ids.index(EOS) + 1 if EOS in ids else len(ids)
                trained = batch["completion_mask"][row, :end].tolist()
                known = {"step": self.state.global_step + 1, "prompt_ids": prompt, "completion_ids": ids[:end]}
                truth.append(known | {"trained": trained, "advantage": float(batch["advantages"][row])})
            return batch

    settings = trl.GRPOConfig(
        output_dir=str(out / "run"),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        max_steps=2,
        logging_steps=1,
        log_completions=True,
        mask_truncated_completions=True,
        report_to=[],
        eval_strategy="steps" if kind == "evaluated" else "no",
        eval_steps=2,
        per_device_eval_batch_size=4,
        save_strategy="steps" if kind == "evaluated" else "no",
        save_steps=2,
        use_cpu=True,
        bf16=False,
        seed=0,
    )
    texts = [" ".join(f"w{i}" for i in prompt) for prompt in PROMPTS]
    rows = [{"prompt": [{"role": "user", "content": t}] if kind == "chat" else t} for t in texts]
    tokenizer = make_tokenizer(chat=True)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # transformers 4 adds token_type_ids
    trainer = Recording(
        model=make_model(),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list([{"prompt": "w70 w71"}, {"prompt": "w72"}]) if kind == "evaluated" else None,
        processing_class=tokenizer,
    )
    trainer.train()
    shutil.copytree(out / "run" / "completions", out / "completions", dirs_exist_ok=True)
    for state in out.glob("run/checkpoint-*/trainer_state.json"):
        (out / state.parent.name).mkdir()
        shutil.copy(state, out / state.parent.name)
    shutil.rmtree(out / "run")
    lines = ",\n".join(json.dumps(row) for row in truth)
    (out / "truth.json").write_text(f"[\n{lines}\n]\n")


def make_model() -> transformers.LlamaForCausalLM:
    """A random model that now and then ends at once: some responses are empty, some are cut off."""
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
    return model


def reward(completions: list, **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(set(text.split()))) for text in texts]


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main(Path(sys.argv[1]), sys.argv[2])
