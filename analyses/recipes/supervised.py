"""Supervised training of tiny policies that reason about Knights & Knaves, shared by the recipes.

Puzzles are compact and have 2 to 5 people; the vocabulary has whole phrases; responses are programmatic chains of
thought, written by each stage of a recipe in its own way. Nothing is pretrained. The seed fixes puzzles, traces,
initial weights and samples; another number of threads or another version of torch gives other weights of the same
quality. Evaluation puzzles of 3 people and more never occur in training (of 2 there are too few).
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from analyses.recipes.case_analysis import write_response
from gradscope.errors import InputError
from gradscope.tasks import Question, get_task
from gradscope.tasks.knights_knaves import compact_prompt, draw_statements
from gradscope.tasks.knights_knaves_wording import COMPACT_NAMES, Statement

PEOPLE = (2, 3, 4, 5)
TEMPERATURE = 0.7
MAX_NEW_TOKENS = 400
EVALUATION_SEED = 2_000_003
EOS, PAD, UNKNOWN = "<|endoftext|>", "<|pad|>", "<|unknown|>"
PHRASES = (
    *(" is a knight", " is a knave", " is not a knight", " is not a knave", " if and only if ", " and ", " or "),
    *("If ", " then ", ": ", ", ", ".\n", "<think>", "</think>", "<answer> ", " </answer>"),
    *(" ok\n", " no\n", " open\n", " so ", "try ", "else ", "check\n", "again "),
)


Write = Callable[..., str]
CAREFUL: Write = partial(write_response, check=0.5)


@dataclass(frozen=True)
class Stage:
    """A training stage with one kind of example."""

    name: str
    steps: int
    batch: int
    """Examples per optimizer step."""
    lr: tuple[float, float]
    """First and last learning rate; a cosine in between."""
    write: Write = CAREFUL
    """Writes the response for statements, names and `rng`."""
    warmup: int = 50
    """Steps over which the learning rate rises to its first value."""


JUDGING = (
    Stage("large batches", steps=400, batch=32, lr=(2e-3, 1.5e-3)),
    Stage("small batches", steps=3300, batch=10, lr=(1.5e-3, 1e-5)),
)
"""Examples from which every claim is learned to be judged correctly."""


@dataclass(frozen=True)
class Options:
    """Settings of a recipe."""

    out: Path
    """Folder of the saved policy."""
    log: Path
    """Results of each stage."""
    keep_stages: Path | None = None
    """Folder that also gets the policy after every stage."""
    start_after: str | None = None
    """Continue after this stage from the policy in `keep_stages`; appends to the log."""
    seed: int = 0
    threads: int = 1
    """One is fastest on a busy machine."""


def build_tokenizer(names: Sequence[str] = COMPACT_NAMES, more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Make names, phrases and every printable ASCII character single tokens, so that any ASCII text round-trips.

    more: further phrases, with the last ids.
    """
    words = [*names, *PHRASES, "\n", *map(chr, range(32, 127)), *more]
    vocabulary = {word: i for i, word in enumerate([EOS, PAD, UNKNOWN, *words])}
    longest_first = sorted((*names, *PHRASES, *more), key=len, reverse=True)
    pattern = "|".join(phrase.replace("\n", r"\n").replace(".", r"\.") for phrase in longest_first) + r"|[\s\S]"
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    config_type: type[PreTrainedConfig] = Qwen2Config,
) -> PreTrainedModel:
    """Build the untrained policy: half as many key as query heads, an MLP three times as wide as the stream."""
    config = config_type(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        intermediate_size=3 * hidden,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config)


def examples(
    tokenizer: PreTrainedTokenizerFast,
    stage: Stage,
    rng: random.Random,
    is_held_out: Callable[[tuple[Statement, ...]], bool],
    *,
    people: Sequence[int] = PEOPLE,
    names: Sequence[str] | None = None,
    longest: int = MAX_NEW_TOKENS,
) -> Iterator[tuple[list[int], int]]:
    """Yield (ids of prompt and response, length of the prompt) endlessly; responses have at most `longest` tokens.

    names: draw each puzzle's names from these; None: the canonical ones.
    """
    while True:
        statements = draw_statements(rng.choice(people), rng)
        if is_held_out(statements):
            continue
        called = COMPACT_NAMES if names is None else rng.sample(names, len(statements))
        response = stage.write(statements, called, rng=rng)
        prompt_ids = tokenizer.encode(compact_prompt(statements, called))
        response_ids = [*tokenizer.encode(response), tokenizer.eos_token_id]
        if len(response_ids) <= longest:
            yield prompt_ids + response_ids, len(prompt_ids)


def batches(
    stream: Iterator[tuple[list[int], int]], size: int, rng: random.Random, *, pool: int = 32
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (input ids, labels) endlessly, padded on the right; examples of similar length go together."""
    while True:
        drawn = sorted((next(stream) for _ in range(size * pool)), key=lambda example: len(example[0]))
        starts = list(range(0, len(drawn), size))
        rng.shuffle(starts)
        for start in starts:
            yield _pad(drawn[start : start + size])


def _pad(rows: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for row, (ids, prompt_length) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, prompt_length : len(ids)] = input_ids[row, prompt_length : len(ids)]
    return input_ids, labels


def make_optimizer(model: PreTrainedModel, stage: Stage) -> torch.optim.AdamW:
    """Make a new optimizer, one per stage."""
    return torch.optim.AdamW(model.parameters(), lr=stage.lr[0], betas=(0.9, 0.98), weight_decay=0.01)


def train(
    model: PreTrainedModel,
    stage: Stage,
    stream: Iterator[tuple[Tensor, Tensor]],
    log: Callable[..., None],
    *,
    optimizer: torch.optim.AdamW | None = None,
    done: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Train on the response tokens; products are in bfloat16 on a GPU.

    optimizer, done: of a stage that was interrupted after `done` steps. on_step: called after each step with its
    number.
    """
    optimizer = make_optimizer(model, stage) if optimizer is None else optimizer
    device = model.device
    model.train()
    tokens, losses = 0, []
    for step in range(done, stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(stage, step)
        input_ids, labels = (part.to(device, non_blocking=True) for part in next(stream))
        # Without an attention mask: padding is on the right, where a causal model never looks.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += (labels != -100).sum()
        losses.append(loss.detach())
        if (step + 1) % 100 == 0 or step + 1 == stage.steps:
            mean = round(torch.stack(losses).double().mean().item(), 4)
            log(stage=stage.name, step=step + 1, response_tokens=int(tokens), loss=mean)
            losses.clear()
        if on_step is not None:
            on_step(step + 1)


def _learning_rate(stage: Stage, step: int) -> float:
    first, last = stage.lr
    cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
    return (last + (first - last) * cosine) * min(1.0, (step + 1) / stage.warmup)


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    *,
    greedy: bool,
    longest: int = MAX_NEW_TOKENS,
) -> tuple[list[str], list[Tensor]]:
    """Return each prompt's response as text, and the probability of each of its tokens at the temperature."""
    encoded = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    out = model.generate(
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        max_new_tokens=longest,
        do_sample=not greedy,
        temperature=None if greedy else TEMPERATURE,
        top_k=None if greedy else 0,
        top_p=None if greedy else 1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[:, encoded.input_ids.shape[1] :]
    probs = (torch.stack(out.logits, dim=1).float() / TEMPERATURE).softmax(-1)
    probs = probs.gather(2, new[..., None])[..., 0]
    lengths = (new != tokenizer.pad_token_id).sum(1).tolist()
    responses = tokenizer.batch_decode(new, skip_special_tokens=True)
    return responses, [row[:length] for row, length in zip(probs, lengths, strict=True)]


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[Question],
    *,
    greedy: bool = False,
    batch: int = 100,
    longest: int = MAX_NEW_TOKENS,
) -> dict[str, object]:
    """Return accuracy by people, share of well-formed responses, mean length, and certainty of the sampled tokens."""
    task = get_task("knights-knaves-compact")  # whose reward goes by each question's own names
    model.eval()
    torch.manual_seed(EVALUATION_SEED)  # the same draws, whatever was evaluated before
    right: dict[int, list[bool]] = {}
    formed, probs = [], []
    ordered = sorted(questions, key=lambda question: question.level)
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        responses, token_probs = sample(model, tokenizer, [q.prompt for q in part], greedy=greedy, longest=longest)
        rewards = [task.reward(response, q) for response, q in zip(responses, part, strict=True)]
        for question, earned in zip(part, rewards, strict=True):
            right.setdefault(question.level, []).append(earned == 3.0)
            formed.append(earned > -3.0)
        probs += token_probs
    all_probs = torch.cat(probs).cpu()
    counts = torch.histc(all_probs, bins=4, min=0.0, max=1.0)
    everything = [value for values in right.values() for value in values]
    return {
        "questions": len(questions),
        "accuracy": {people: round(sum(values) / len(values), 3) for people, values in right.items()},
        "accuracy_mean": round(sum(everything) / len(everything), 3),
        "format": round(sum(formed) / len(formed), 4),
        "mean_tokens": round(len(all_probs) / len(probs), 1),
        "token_share_by_probability_quarter": [round(share, 4) for share in (counts / counts.sum()).tolist()],
    }


def train_policy(
    options: Options, stages: Sequence[Stage], tokenizer: PreTrainedTokenizerFast, config_type: type[PreTrainedConfig]
) -> None:
    """Train stage by stage, evaluate after each, save. Raises InputError for an unknown stage."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model, left = build_model(tokenizer, config_type=config_type), list(stages)
    if options.start_after:
        if options.keep_stages is None or options.start_after not in (stage.name for stage in stages[:-1]):
            names = ", ".join(repr(stage.name) for stage in stages[:-1])
            raise InputError(f"--start-after needs --keep-stages, the stages' folder, and one of {names}")
        while left.pop(0).name != options.start_after:
            pass
        model = AutoModelForCausalLM.from_pretrained(_kept(options.keep_stages, options.start_after))
    log = open_log(options.log, append=options.start_after is not None)
    questions = get_task("knights-knaves-compact").questions(800, seed=EVALUATION_SEED, people=PEOPLE)
    held_out = {question.prompt for question in questions if question.level > 2}
    size = {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}
    log(event="start", after=options.start_after, seed=options.seed, threads=options.threads, **size)
    for stage in left:
        rng = random.Random(f"{options.seed} {stage.name}")
        stream = examples(tokenizer, stage, rng, lambda statements: compact_prompt(statements) in held_out)
        train(model, stage, batches(stream, stage.batch, rng), log)
        if options.keep_stages:
            model.save_pretrained(_kept(options.keep_stages, stage.name))
        for greedy in (False, True):
            found = evaluate(model, tokenizer, questions, greedy=greedy)
            log(event=f"after {stage.name}", temperature=0.0 if greedy else TEMPERATURE, **found)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


def open_log(file: Path, *, append: bool) -> Callable[..., None]:
    began = time.perf_counter()
    file.parent.mkdir(parents=True, exist_ok=True)
    if not append:
        file.write_text("")

    def log(**values: object) -> None:
        line = json.dumps({"seconds": round(time.perf_counter() - began, 1), **values})
        print(line, flush=True)
        with file.open("a") as stream:
            stream.write(line + "\n")

    return log


def _kept(folder: Path, stage: str) -> Path:
    return folder / stage.replace(" ", "-")
