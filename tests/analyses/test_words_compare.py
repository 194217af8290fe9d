"""The comparison on a pretrained policy's batch, here on the embedded one: which policy sees whose responses."""

import pandas as pd
import pytest
import torch
from support.processes import Command

from analyses.measure import words_compare
from gradscope import load_policy

WEIGHTINGS = ("reweight", "up-weight", "gspo")
SETTINGS = {"questions": 4, "task": "knights-knaves-compact", "weightings": WEIGHTINGS}


def save_another(folder) -> str:
    """The embedded policy, some steps away."""
    policy = load_policy("embedded")
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.05)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.all
def test_each_case_has_its_policy_and_its_responses(tmp_path):
    kept = tmp_path / "kept"
    out = kept / "words" / "measured" / "words_compare"
    other = save_another(tmp_path / "other")
    words_compare.measure(out, folders=("embedded", other, other), **SETTINGS)
    found = pd.read_csv(out / "weightings.csv").fillna({"same_as": ""}).set_index(["case", "method"])
    for case in ("on-policy", "after training"):  # every ratio is 1
        expected = {"grpo": "", "reweight": "", "up-weight": "", "gspo": "grpo"}
        assert found.loc[case, "same_as"].to_dict() == expected
    assert (found.loc["older rollouts", "same_as"] == "").all()
    # What enlarges rare tokens and what damps them are compared with the same gradient.
    assert found.loc[("on-policy", "up-weight"), "norm_ratio"] > 1 > found.loc[("on-policy", "reweight"), "norm_ratio"]
    samples = pd.read_csv(out / "samples.csv")
    assert samples["responses"].tolist() == [32, 16, 32] and samples["tokens"].nunique() == 3
    shares = pd.read_csv(out / "by_interval.csv").groupby(["case", "method"])["energy_share"].sum()
    assert shares.to_numpy() == pytest.approx(1.0)

    # The cosines follow from what is kept.
    products = pd.read_parquet(out / "products.parquet").groupby(["case", "method", "step"])
    square, inner = products["along"].sum(), products["to_plain"].sum()
    plain, own = (("on-policy", name, "all") for name in ("grpo", "reweight"))
    cosine = inner[own] / (square[plain] * square[own]) ** 0.5
    assert found.loc[own[:2], "cosine"] == pytest.approx(cosine)
    tokens = pd.read_parquet(out / "tokens.parquet").query("case == 'on-policy' and param_grad_norm.notna()")
    energy, ratio = (tokens["weight"] * tokens["param_grad_norm"]) ** 2, 0.7 + 0.3 * tokens["prob"]
    alone = (ratio * energy).sum() / (energy.sum() * (ratio**2 * energy).sum()) ** 0.5
    assert found.loc[own[:2], "cosine_from_energies"] == pytest.approx(alone, abs=0.01)  # perhaps of a sample

    figures = tmp_path / "figures"
    drawn = Command("-m", "analyses.paper.words_compare", "--out", figures, GRADSCOPE_RUNS=str(kept)).wait()
    assert drawn.status == 0, drawn.stderr
    table = pd.read_csv(figures / "paper/words/data/words_compare.csv").set_index(["case", "method"])
    assert table["cosine"].to_dict() == pytest.approx(found["cosine"].to_dict(), rel=1e-5)
    names = {"on-policy", "older_rollouts", "after_training"}
    assert {path.name for path in figures.rglob("*.png")} == {f"words_compare_{name}.png" for name in names}
