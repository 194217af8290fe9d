"""Datasets of given text, of words of the tests' tokenizer, written by `datasets` as TRL's users write them."""

from __future__ import annotations

from pathlib import Path

TEXTS = [
    (f"w{4 + n} w{11 + 2 * n} ", f"w{20 + n} w{30 + n % 3} w{40 + n}", f"w{60 + n} w{70 + n % 2}") for n in range(12)
]
"""Prompt, good and bad answer."""


def write_sft_dataset(path: Path) -> Path:
    """JSONL: prompt and completion."""
    from datasets import Dataset

    Dataset.from_list([{"prompt": prompt, "completion": good} for prompt, good, _ in TEXTS]).to_json(path)
    return path


def write_preferences(path: Path) -> Path:
    """A saved folder with chats: chosen and rejected, in which the prompt is what both begin with."""
    from datasets import Dataset

    def chat(prompt: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt.strip()}, {"role": "assistant", "content": answer}]

    rows = [{"chosen": chat(prompt, good), "rejected": chat(prompt, bad)} for prompt, good, bad in TEXTS]
    Dataset.from_list(rows).save_to_disk(path)
    return path


def write_kto_dataset(path: Path) -> Path:
    """Parquet would do as well: prompt, completion and label, in JSONL."""
    from datasets import Dataset

    rows = [
        {"prompt": prompt, "completion": text, "label": label}
        for prompt, good, bad in TEXTS
        for text, label in ((good, True), (bad, False))
    ]
    Dataset.from_list(rows).to_json(path)
    return path
