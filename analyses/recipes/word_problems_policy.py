"""Warm-start SmolLM2-135M-Instruct on word problems: worked answers in varied words, in the model's own chat format.

    python -m analyses.recipes.pretrained smollm2 --out work/smollm2
    python -m analyses.recipes.word_problems_policy --model work/smollm2 --out work/smollm2-words

The original model hardly ever answers in the requested form, so reinforcement learning has nothing to climb. A short
supervised training (analyses/recipes/supervised.py) teaches the form and one-line calculation, and stops before its
sums are reliable. Every answer draws its words anew: templated answers would leave the policy certain of everything but
the digits. The seed fixes problems, words and samples; another number of threads or version of torch gives other
weights of the same quality. The log has accuracy and the certainty of the sampled tokens at the training temperature.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from analyses.common.script import exit_with
from analyses.recipes.supervised import Stage, batches, open_log, train
from gradscope.policy import load_policy
from gradscope.sampling import make_sampler, rollout_rows
from gradscope.tasks import get_task
from gradscope.tasks.word_problems import LEVELS, Problem, draw_problem, word_problems

STAGE = Stage("worked answers", steps=64, batch=4, lr=(1.5e-4, 1.5e-5), warmup=10)
LONGEST = 25
"""Maximum tokens of a worked answer, including the end of turn; longer ones are reworded."""
EVALUATION_SEED = 2_000_003


@dataclass(frozen=True)
class Wording:
    """Phrases from which a worked answer is drawn."""

    first: tuple[str, ...]
    equals: tuple[str, ...]
    further: tuple[str, ...]
    last: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]
    """Of each sign."""


_FIRST = ("", "", "First ", "We get ", "So ", "Now ", "That makes ", "It is ", "Let's see: ", "Well, ", "There are ")
_EQUALS = ("{a}{sign}{b}={c}", "{a} {word} {b} is {c}", "{a}{sign}{b} = {c}", "{a} {sign} {b}={c}")
_NEXT = (
    *(", {sign}{b}={c}", ", then {sign}{b}={c}", "; {sign}{b} is {c}", " and {sign}{b} = {c}"),
    ". Then {sign}{b}: {c}",
)
_LAST = (
    *(". The answer is {c}.", ", so the answer is {c}.", ". So the answer is {c}.", "; the answer is {c}."),
    *(". Thus, the answer is {c}.", "! The answer is {c}", ". Answer: {c}.", ", hence the answer is {c}."),
)
_OPENINGS = (
    *(
        "OK, ",
        "Here ",
        "To start, ",
        "I count ",
        "Start: ",
        "We have ",
        "Take ",
        "I get ",
        "Work: ",
        "Think: ",
        "Just ",
    ),
    *("This is ", "You get ", "Note ", "Begin: ", "All right: ", "Hmm, ", "Sure: ", "Calculate ", "Step 1: ", "See: "),
)
_RESULTS = (
    *("{a} {word} {b} makes {c}", "{a} {word} {b} gives {c}", "{a} {sign} {b} is {c}", "{a} {word} {b} equals {c}"),
    *("{a}{sign}{b}: {c}", "{a} {word} {b} = {c}", "{a}{sign}{b} makes {c}", "{a}{sign}{b} gives {c}"),
)
_STEPS = (
    *("; then {sign}{b} gives {c}", ", and {sign}{b} makes {c}", ". Next {sign}{b} = {c}", " -> {sign}{b}: {c}"),
    *(". After {sign}{b}: {c}", ", next {sign}{b} is {c}", "! Now {sign}{b}={c}", " | {sign}{b}={c}"),
    *(", with {sign}{b} {c}", ": {sign}{b} gives {c}"),
)
_ENDS = (
    *(
        ". Hence the answer is {c}.",
        ", and the answer is {c}.",
        ". Therefore the answer is {c}.",
        ": the answer is {c}.",
    ),
    *(". Answer {c}", ", therefore the answer is {c}", " -> the answer is {c}.", ". My answer: {c}.", " | answer: {c}"),
    *(". Then the answer is {c}!", ", which means the answer is {c}.", ". Overall, the answer is {c}."),
)
WORDINGS = {
    "plain": Wording(_FIRST, _EQUALS, _NEXT, _LAST, {"+": ("plus",), "-": ("minus",), "*": ("times",)}),
    "varied": Wording(
        _FIRST + _OPENINGS,
        _EQUALS + _RESULTS,
        _NEXT + _STEPS,
        _LAST + _ENDS,
        {"+": ("plus", "and", "with"), "-": ("minus", "less", "without"), "*": ("times", "by", "x")},
    ),
}


@dataclass(frozen=True)
class Options:
    model: Path
    """The pretrained checkpoint."""
    out: Path
    """Folder for the warm-started checkpoint."""
    wording: Literal["plain", "varied"] = "plain"
    """How many phrases the worked answers are drawn from: after "varied" the policy is less certain of its words."""
    log: Path = Path("analyses/recipes/logs/word_problems_policy.jsonl")
    questions: int = 64
    """Questions for the accuracy, four responses each."""
    seed: int = 0
    threads: int = 1
    """One is fastest on a busy machine."""


def write_answer(problem: Problem, rng: random.Random, wording: Wording = WORDINGS["plain"]) -> str:
    """Solve a problem in one line of randomly drawn words.

    >>> problem = draw_problem(3, random.Random(0))
    >>> problem.text
    'Leo counts 8 bags with 2 stones each. He breaks 15. How many stones is that?'
    >>> write_answer(problem, random.Random(1))
    'First 8*2=16; -15 is 1, so the answer is 1.'
    """
    (sign, by), *more = problem.steps
    result, *results = problem.results
    first, equals = rng.choice(wording.first), rng.choice(wording.equals)
    words = wording.words[sign]
    word = words[0] if len(words) == 1 else rng.choice(words)  # "plain" draws nothing here
    text = first + equals.format(a=problem.start, sign=sign, word=word, b=by, c=result)
    for (sign, by), result in zip(more, results, strict=True):
        text += rng.choice(wording.further).format(sign=sign, b=by, c=result)
    return text + rng.choice(wording.last).format(c=result)


def examples(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, wording: Wording
) -> Iterator[tuple[list[int], int]]:
    """Yield (ids of prompt and worked answer, length of the prompt) endlessly."""
    while True:
        problem = draw_problem(rng.choice(LEVELS), rng)
        chat = word_problems.question(problem).prompt
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer_ids = []
        while not 0 < len(answer_ids) <= LONGEST:
            answer = write_answer(problem, rng, wording)
            answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        yield prompt_ids + answer_ids, len(prompt_ids)


def evaluate(folder: Path, questions: int, *, temperature: float = 1.0) -> dict[str, object]:
    """Return accuracy by level, share of answers in the requested form, mean length, and the tokens' certainty."""
    policy, task = load_policy(folder), get_task("word-problems")
    drawn = task.questions(questions, seed=EVALUATION_SEED)
    settings = {"n": 4, "temperature": temperature, "max_new_tokens": 2 * LONGEST, "seed": 0}
    with closing(make_sampler("hf", policy, batch_size=128)) as sampler:
        rows = rollout_rows(policy, drawn, task=task, sampler=sampler, **settings)
    right: dict[int, list[bool]] = {}
    for row in rows:
        right.setdefault(row["level"], []).append(row["correct"])
    probs = [math.exp(logprob) for row in rows for logprob in row["old_logprobs"]]
    counts = torch.histc(torch.tensor(probs), bins=4, min=0.0, max=1.0)
    return {
        "questions": questions,
        "temperature": temperature,
        "accuracy": {level: round(sum(values) / len(values), 3) for level, values in right.items()},
        "accuracy_mean": round(sum(row["correct"] for row in rows) / len(rows), 3),
        "format": round(sum(row["format_ok"] for row in rows) / len(rows), 3),
        "mean_tokens": round(len(probs) / len(rows), 1),
        "token_share_by_probability_quarter": [round(share, 4) for share in (counts / counts.sum()).tolist()],
    }


def main(options: Options) -> None:
    """Train and save; evaluate before and after."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    log = open_log(options.log, append=False)
    settings = {"seed": options.seed, "threads": options.threads, "wording": options.wording}
    log(event="start", **settings, **evaluate(options.model, options.questions))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rng = random.Random(f"{options.seed} {STAGE.name}")
    train(model, STAGE, batches(examples(tokenizer, rng, WORDINGS[options.wording]), STAGE.batch, rng), log)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    log(event=f"after {STAGE.name}", **evaluate(options.out, options.questions))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
