"""Does the trainer learn? Five methods, three seeds, 24 steps on the embedded policy, judged on puzzles kept aside.

    python -m analyses.learning_curves [--out figures] [--runs runs/learning_curves] [--jobs 2]

Every method starts from the same policy with the settings of the preset kk-embedded, sees the same puzzles at the same
seed, and is judged on the same 150 puzzles (2–4 people), which training never draws: puzzles are dealt to training or
test by a hash of their text. About four minutes a run on one core; started again, it goes on where it was.

Sampled accuracy can rise because the policy has learnt, or only because it has become more certain: greedy decoding of
the untrained policy already answers more puzzles right than its samples do. So beside each trained policy stands the
untrained one at the temperature at which its samples have the trained one's entropy, and both decoded greedily.

Differs from the paper: the policy, its puzzles and 24 steps in place of 350; α, η, clips, β and T are the paper's.
"""

from __future__ import annotations

import json
import random
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import tyro
from scipy import stats
from tqdm import tqdm

from gradscope import load_policy
from gradscope.evaluation import evaluate
from gradscope.plot_style import NEUTRAL, paper_style, save_figure
from gradscope.run_folder import write_text
from gradscope.sampling.hf import HFSampler
from gradscope.tasks import Grade, Question, get_task, register
from gradscope.tasks.registry import Task
from gradscope.trainer.checkpoints import list_checkpoints
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.loop import train
from gradscope.trainer.presets import get_preset

METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "Reweight": {"reweight_alpha": 0.3},
    "Lopti": {"lopti_eta": 0.5},
    "both": {"reweight_alpha": 0.3, "lopti_eta": 0.5},
    "REINFORCE++": {"algorithm": "reinforce++"},
}
"""What differs from the preset."""
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Of the untrained policy's samples; the last is that of training."""
PEOPLE, QUESTIONS, SAMPLES = (2, 3, 4), 150, 4
EMA = 0.9


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    runs: Path = Path("runs/learning_curves")
    """Where the runs lie; not kept in the repository."""
    jobs: int = 2
    """Processes side by side, one thread each."""
    seeds: int = 3
    steps: int = 24


class _Kept:
    """Compact puzzles of one side: four fifths are for training, one fifth for the test, by a hash of their text."""

    def __init__(self, name: str, *, test: bool) -> None:
        self.name, self.test, self.task = name, test, get_task("knights-knaves-compact")

    def questions(self, n: int, *, seed: int, people: tuple[int, ...] = PEOPLE) -> list[Question]:
        """n different puzzles, whose number of people cycles."""
        rng, kept = random.Random(seed), {}
        while len(kept) < n:
            level = people[len(kept) % len(people)]
            [question] = self.task.questions(1, seed=rng.getrandbits(62), people=(level,))
            if (zlib.crc32(question.prompt.encode()) % 5 == 0) == self.test:
                kept[question.prompt] = question
        return list(kept.values())

    def reward(self, response: str, question: Question) -> float:
        return self.task.reward(response, question)

    def grade(self, response: str, question: Question) -> Grade:
        return self.task.grade(response, question)


TRAIN: Task = register(_Kept("kk-kept-train", test=False))
TEST: Task = register(_Kept("kk-kept-test", test=True))


def configuration(method: str, seed: int, steps: int) -> TrainConfig:
    """The preset with what the method changes, on the puzzles kept for training."""
    preset = replace(get_preset("kk-embedded"), task=TRAIN.name, people=PEOPLE, trackers=())
    return replace(preset, steps=steps, seed=seed, save_every=10, keep_checkpoints=1, **METHODS[method])


def run(method: str, seed: int, options: Options) -> tuple[str, int]:
    """Train one policy, or go on, and judge it."""
    folder = options.runs / method.lower() / f"seed{seed}"
    last = train(configuration(method, seed, options.steps), folder, resume=True, progress=False)
    judge(str(last), TEMPERATURES[-1], folder / f"test-{last.name}.json")
    return method, seed


def judge(model: str, temperature: float, file: Path) -> Path:
    """Accuracy of a checkpoint on the test's puzzles, sampled and greedy, and its entropy; kept in a file."""
    if not file.is_file():
        policy = load_policy(model)
        questions = TEST.questions(QUESTIONS, seed=0)
        sampler = HFSampler(policy, batch_size=256, progress=False)
        settings = {"k": SAMPLES, "temperature": temperature, "max_new_tokens": 400, "sampler": sampler}
        result = evaluate(policy, TEST, questions, **settings)
        sampled = result.responses[~result.responses["greedy"]]
        # E[−log π] of sampled tokens is the entropy, averaged over the tokens that the policy writes.
        entropy = -float(np.concatenate(sampled["old_logprobs"].to_list()).mean())
        scores = {name: result.scores[name].tolist() for name in (f"avg@{SAMPLES}", "greedy_accuracy")}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"entropy": entropy, **scores}))
    return file


def _one_thread() -> None:
    torch.set_num_threads(1)
    from transformers.utils import logging

    logging.disable_progress_bar()


def work(options: Options) -> None:
    """All runs and all judgements that are not there yet, side by side."""
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), _one_thread) as pool:
        jobs = [
            pool.submit(judge, "embedded", temperature, options.runs / f"untrained/T{temperature}.json")
            for temperature in TEMPERATURES
        ]
        jobs += [pool.submit(run, method, seed, options) for seed in range(options.seeds) for method in METHODS]
        for job in tqdm(jobs, "runs"):
            job.result()


def table(options: Options) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row per method, seed and step with what was logged; a row per method and seed with the test's results."""
    curves, results = [], []
    untrained = [_read(options.runs / f"untrained/T{temperature}.json") for temperature in TEMPERATURES]
    for method in METHODS:
        for seed in range(options.seeds):
            folder = options.runs / method.lower() / f"seed{seed}"
            curve = pd.read_json(folder / "metrics.jsonl", lines=True)
            names = ["step", "reward_mean", "accuracy", "response_length", "entropy", "kl", "optimizer_steps"]
            timed = ["seconds_sampling", "seconds_training", "seconds_other"]
            curves.append(curve[names + timed].assign(method=method, seed=seed))
            trained = _read(folder / f"test-{list_checkpoints(folder)[-1].name}.json")
            results.append({"method": method, "seed": seed, **trained, **match(trained["entropy"], untrained)})
    return pd.concat(curves, ignore_index=True), pd.DataFrame(results)


def match(entropy: float, untrained: list[dict[str, float]]) -> dict[str, float]:
    """The untrained policy where its entropy is the trained one's, between neighbouring temperatures; 0 is greedy."""
    last = untrained[-1]
    entropies = [0.0, *(u["entropy"] for u in untrained)]
    return {
        "matched_temperature": float(np.interp(entropy, entropies, [0.0, *TEMPERATURES])),
        "untrained_sampled": last["sampled"],
        "untrained_greedy": last["greedy"],
        "untrained_matched": float(np.interp(entropy, entropies, [last["greedy"], *(u["sampled"] for u in untrained)])),
        "untrained_entropy": last["entropy"],
    }


def summarize(results: pd.DataFrame) -> pd.DataFrame:
    """Per method: means over seeds of the paired gains, each with its 95 % t-interval over seeds."""
    gains = {
        "gain_sampled": results["sampled"] - results["untrained_sampled"],
        "gain_greedy": results["greedy"] - results["untrained_greedy"],
        "gain_over_matched": results["sampled"] - results["untrained_matched"],
    }
    rows = []
    for method, group in results.groupby("method", sort=False):
        row = {"method": method, "seeds": len(group), "sampled": group["sampled"].mean()}
        for name, gain in gains.items():
            values = gain[group.index]
            half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else np.nan
            row |= {name: values.mean(), f"{name}_lower": values.mean() - half, f"{name}_upper": values.mean() + half}
        rows.append(row)
    return pd.DataFrame(rows)


PANELS = {
    "reward_mean": ("Reward in training", "mean reward"),
    "accuracy": ("Accuracy in training", "share of right answers"),
}
COLORS = dict(zip(METHODS, plt.get_cmap("tab10").colors, strict=False))


def smooth(curves: pd.DataFrame) -> pd.DataFrame:
    """Exponential means of reward and accuracy per method and step: over seeds their mean, lowest and highest."""
    frames = []
    for column in PANELS:
        for method, group in curves.groupby("method", sort=False):
            wide = group.pivot(index="step", columns="seed", values=column).ewm(alpha=1 - EMA, adjust=True).mean()
            frame = pd.DataFrame({"panel": column, "method": method, "ema": EMA, "seeds": wide.shape[1]}, wide.index)
            frames.append(frame.assign(mean=wide.mean(axis=1), lowest=wide.min(axis=1), highest=wide.max(axis=1)))
    return pd.concat(frames).reset_index()


@paper_style()
def draw_curves(smoothed: pd.DataFrame, out: Path) -> None:
    """Reward and accuracy in training against the step."""
    figure, panels = plt.subplots(1, 2, figsize=(7.3, 2.8), layout="constrained")
    for panel, (column, (title, label)) in zip(panels, PANELS.items(), strict=True):
        for method, rows in smoothed[smoothed["panel"] == column].groupby("method", sort=False):
            panel.plot(rows["step"], rows["mean"], color=COLORS[method], label=method)
            panel.fill_between(rows["step"], rows["lowest"], rows["highest"], color=COLORS[method], alpha=0.12, lw=0)
        panel.set(xlabel="step", ylabel=label, title=title)
    panels[0].legend()
    words = (
        f"Embedded policy, exponential mean ({EMA}); line: mean of {smoothed['seeds'].max()} seeds, band: their range"
    )
    figure.supxlabel(words, fontsize=7)
    save_figure(figure, out / "learning_curves.png", smoothed)


@paper_style()
def draw_test(results: pd.DataFrame, out: Path) -> None:
    """Accuracy on the test, sampled and greedy, beside the untrained policy's."""
    figure, panel = plt.subplots(figsize=(5.2, 2.9), layout="constrained")
    kinds = {"sampled": ("o", 0.0), "untrained_matched": ("_", 0.0), "greedy": ("^", 0.22)}
    labels = {"sampled": "sampled, T = 0.7", "untrained_matched": "untrained at its entropy", "greedy": "greedy"}
    for place, (method, group) in enumerate(results.groupby("method", sort=False)):
        for kind, (marker, shift) in kinds.items():
            color = NEUTRAL if kind == "untrained_matched" else COLORS[method]
            size = 90 if marker == "_" else 18
            x = np.full(len(group), place + shift)
            panel.scatter(
                x, group[kind], marker=marker, s=size, color=color, label=labels[kind] if place == 0 else None
            )
    panel.axhline(results["untrained_sampled"].iloc[0], color=NEUTRAL, linewidth=0.8)
    panel.axhline(results["untrained_greedy"].iloc[0], color=NEUTRAL, linewidth=0.8, linestyle=":")
    panel.text(
        len(METHODS) - 0.5, results["untrained_sampled"].iloc[0], " untrained,\n sampled", va="center", fontsize=7
    )
    panel.text(len(METHODS) - 0.5, results["untrained_greedy"].iloc[0], " untrained,\n greedy", va="center", fontsize=7)
    panel.set_xticks(range(len(METHODS)), list(METHODS))
    panel.set(ylabel="accuracy, puzzles kept aside", xlim=(-0.5, len(METHODS) - 0.5))
    panel.legend(loc="center left", bbox_to_anchor=(0.0, 0.45))
    save_figure(figure, out / "learning_test.png", results)


def _read(file: Path) -> dict[str, float]:
    found = json.loads(file.read_text(encoding="utf-8"))
    scores = {"sampled": np.mean(found[f"avg@{SAMPLES}"]), "greedy": np.mean(found["greedy_accuracy"])}
    return {"entropy": found["entropy"], **scores}


def main(options: Options) -> None:
    work(options)
    curves, results = table(options)
    draw_curves(smooth(curves), options.out)
    draw_test(results, options.out)
    summary = summarize(results)
    summary.to_csv(options.out / "learning_summary.csv", index=False, float_format="%.4f")
    print(summary.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
