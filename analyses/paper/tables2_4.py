"""Tables 2, 3 and 4 of the paper, whatever the scale, from the presets, analyses/runs.toml and the runs' reward.

    python -m analyses.paper.tables2_4 [--out figures]

Each row has the paper's label, its value and ours, and whether they are equal. The released code deviates from the
paper: Table 2's `ppo_mini_batch_size` counts the questions of a batch and `ppo_micro_batch_size` the responses of an
optimizer step, which the code calls its mini-batch; α on puzzles is .3 in the text, and in the code .2 for Reweight
alone. Table 4 says −1.5 for "partially correct" and −2 for "completely wrong" answers, which suggests some people named
rightly or none; the code gives −1.5 for every wrong answer that can be parsed, and −2 for unparsable or badly formatted
ones. Table 4 here is the reward of constructed responses, beside both readings.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import tyro

from analyses.common.experiments import configure, tracks_of
from analyses.common.script import Options, exit_with
from analyses.common.tables import ABSENT, write_table
from gradscope.tasks.knights_knaves import reward
from gradscope.trainer import TrainConfig, get_preset

PUZZLES, MATH = ("kk-qwen2.5-3b", "kk-qwen2.5-7b"), ("math-qwen2.5-7b", "orz-qwen2.5-7b")

TABLE_2 = (
    ("Sampling temperature (temperature)", "temperature", 0.7, 1.0),
    ("Question num per batch (ppo_mini_batch_size)", "questions_per_step", 64, 128),
    ("Answer num per question (rollout.n)", "group_size", 8, 8),
    ("Max tokens num per response (max_response_length)", "max_new_tokens", 4096, 4096),
    ("Update batch size (ppo_micro_batch_size)", "mini_batch_size", 256, 512),
    ("Learning rate (optim.lr)", "learning_rate", 1e-6, 1e-6),
    ("KL divergence coefficient (kl_loss_coef)", "kl_coef", 0.001, 0.001),
    ("Lower clipping threshold (clip_ratio_low)", "clip_ratio_low", 0.2, 0.2),
    ("Upper clipping threshold (clip_ratio_high)", "clip_ratio_high", 0.24, 0.24),
)
"""Table 2: label, our setting, the paper's value for K&K and for math. Its optimizer, adamw, is no setting here."""

TABLE_3 = (
    ("Advantage Reweighting (α)", "reweight", "reweight_alpha", 0.3, 0.1),
    ("Lopti (η)", "lopti", "lopti_eta", 0.5, 0.5),
    ("Joint operation: α", "both", "reweight_alpha", 0.3, None),
    ("Joint operation: η", "both", "lopti_eta", 0.5, None),
    ("Advantage Reweighting of REINFORCE++ (α, App. D)", "rpp-reweight", "reweight_alpha", 0.1, None),
    ("Lopti of REINFORCE++ (η, App. D)", "rpp-lopti", "lopti_eta", 0.5, None),
)
"""Table 3 and Appendix D: label, variant, setting, the paper's value for K&K and for math. Joint operation is "True" on
K&K; on math it is "False", though the text reports it, without a value."""

NAMES, SOLUTION = ("Zoey", "Oliver", "Mia"), (True, False, False)
ANSWERS = {
    "all people right": "Zoey is a knight, Oliver is a knave, Mia is a knave",
    "some people right": "Zoey is a knight, Oliver is a knight, Mia is a knave",
    "nobody right": "Zoey is a knave, Oliver is a knight, Mia is a knight",
    "not to be read": "Zoey is a knight, and the others lie",
}
AS_TEXT = {"all people right": 2.0, "some people right": -1.5, "nobody right": -2.0, "not to be read": -2.0}
AS_CODE = AS_TEXT | {"nobody right": -1.5}
"""Reward of a well-formatted answer. A badly formatted one earns −2 in the code, which ignores its answer."""


def table2() -> pd.DataFrame:
    """Return label and setting, then for K&K and math the paper's value, ours, and whether they are equal."""
    rows = []
    for label, setting, *papers in TABLE_2:
        ours = [_only(presets, lambda preset, name=setting: getattr(preset, name)) for presets in (PUZZLES, MATH)]
        rows.append({"hyperparameter": label, "setting here": setting} | _beside(papers, ours))
    return pd.DataFrame(rows)


def table3() -> pd.DataFrame:
    """Return label, variant and setting, then as in `table2`; empty if the paper or the runs have no value."""
    rows = []
    for label, variant, setting, *papers in TABLE_3:
        ours = [_of_variant(kind, variant, setting) for kind in ("puzzles", "math")]
        rows.append({"hyperparameter": label, "variant": variant, "setting here": setting} | _beside(papers, ours))
    return pd.DataFrame(rows)


def table4() -> pd.DataFrame:
    """Return a row per constructed response: its format and answer, both readings of Table 4, and the actual reward."""
    rows = []
    for form, sign in (("good", 1.0), ("bad", -1.0)):
        for answer, text in ANSWERS.items():
            response = f"Let me see. </think><answer> {text} </answer>"
            if form == "bad":
                response = response.replace("</think>", "")
            rows.append(
                {
                    "format": form,
                    "answer": answer,
                    "the paper's text": sign + AS_TEXT[answer],
                    "the released code": sign + (AS_CODE[answer] if form == "good" else -2.0),
                    "here": reward(response, names=NAMES, solution=SOLUTION),
                }
            )
    return pd.DataFrame(rows)


def _beside(papers: list[float | None], ours: list[float | None]) -> dict[str, object]:
    cells: dict[str, object] = {}
    for kind, paper, own in zip(("K&K", "math"), papers, ours, strict=True):
        equal = None if paper is None or own is None else paper == own
        cells |= {f"{kind}: paper": paper, f"{kind}: here": own, f"{kind}: equal": equal}
    return cells


def _of_variant(kind: str, variant: str, setting: str) -> float | None:
    """Return the setting in the variant's runs of the paper's scale; None if they are not of this kind."""
    tracks = [t for t in tracks_of(kind, "paper") if kind == "puzzles" or not variant.startswith("rpp")]
    return _only(tracks, lambda track: getattr(configure("paper", track, variant), setting)) if tracks else None


def _only(things: tuple[str, ...] | list[str], value: Callable[[str | TrainConfig], float]) -> float:
    """Return the common value: presets and tracks of a kind share these settings."""
    [found] = {value(get_preset(thing) if thing in PUZZLES + MATH else thing) for thing in things}
    return found


def main(options: Options) -> None:
    """Write and print the three tables."""
    for name, table in (("table2", table2()), ("table3", table3()), ("table4", table4())):
        cells = table.map(_cell)
        write_table(cells, options.at(f"{name}.md"))
        print(f"{name}\n{cells.fillna(ABSENT).to_string(index=False)}\n")


def _cell(value: object) -> str | None:
    """Format numbers as they are, since fixed decimals would lose a learning rate."""
    if value is None or value != value:
        return None
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
