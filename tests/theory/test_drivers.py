"""Drivers beside probability: classes and quantiles against comparisons one by one, regressions against numpy's own."""

import numpy as np
import pandas as pd
import pytest

from gradscope.theory import add_drivers, regress_norms
from gradscope.theory.drivers import POOLED, token_classes
from gradscope.updates import right_direction_shares

X = ["log_one_minus_prob", "entropy"]
NORMS = ["act_grad_norm.0", "act_grad_norm.1", "param_grad_norm"]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def make_table(
    prob: float = 1.0, entropy: float = 0.0, *, prompts: int = 20, each: int = 15, noise: float = 0.3, mix: float = 0.6
) -> pd.DataFrame:
    """log norm = layer + prob · log(1−π) + entropy · entropy + noise; entropy is correlated with log(1−π), by `mix`."""
    draw = rng(7)
    group = np.repeat(np.arange(prompts), each)
    rest = -6 * draw.random(len(group))
    spread = 1.7 * (mix * (rest + 3) / 1.73 + np.sqrt(1 - mix**2) * draw.standard_normal(len(group)))
    table = pd.DataFrame({"group": group, "log_one_minus_prob": rest, "entropy": spread})
    table["logit_grad_norm"] = 1.2 * np.exp(rest)
    for layer, name in enumerate(NORMS):
        own = draw.standard_normal(prompts)[group] + draw.standard_normal(len(group))
        table[name] = np.exp(2.0 * layer + prob * rest + entropy * spread + noise * own)
    return table


def z(values: np.ndarray) -> np.ndarray:
    return (values - values.mean(0)) / values.std(0)


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    """Coefficients and R² of y on x, in which an intercept must be a column."""
    coefficients = np.linalg.lstsq(x, y, rcond=None)[0]
    return coefficients, 1 - ((y - x @ coefficients) ** 2).sum() / ((y - y.mean()) ** 2).sum()


def design(table: pd.DataFrame, names: list[str], floor: float = 1e-3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drivers, one-hot layers and log norm of the tokens above the floor, one norm after the other."""
    parts = [table[(table["log_one_minus_prob"] > np.log(floor)) & (table[name] > 0)] for name in names]
    drivers = np.concatenate([part[X].to_numpy(float) for part in parts])
    layers = np.repeat(np.eye(len(names)), [len(part) for part in parts], axis=0)
    return drivers, layers, np.log(np.concatenate([part[name] for part, name in zip(parts, names, strict=True)]))


def rows_of(table: pd.DataFrame, quantity: str, **settings: object) -> pd.DataFrame:
    found = regress_norms(table, seed=rng(), **{"resamples": 100} | settings)
    return found[found["quantity"] == quantity].set_index("driver")


@pytest.mark.parametrize("names", [["act_grad_norm.1"], ["param_grad_norm"], NORMS[:2]])
def test_coefficients_and_shares_of_variance_are_numpys_least_squares(names):
    table = make_table(0.8, 0.3)
    table.loc[5:40, "act_grad_norm.0"] = np.nan  # the layers have different tokens
    table.loc[62:70, "act_grad_norm.1"] = 0.0
    drivers, layers, y = design(table, names, floor=0.01)
    quantity = names[0] if len(names) == 1 else POOLED
    fit = rows_of(table, quantity, floor=0.01)
    coefficients, r2 = least_squares(np.hstack([z(drivers), layers]), z(y))
    assert fit["coefficient"].iloc[:2].tolist() == pytest.approx(coefficients[:2].tolist(), rel=1e-9)
    assert fit["r2"].tolist() == pytest.approx([r2] * len(fit), rel=1e-9)
    ones = np.ones((len(y), 1))
    for j, name in enumerate(X):
        assert fit.loc[name, "r2_alone"] == pytest.approx(least_squares(np.hstack([ones, z(drivers)[:, [j]]]), z(y))[1])
        rest = np.hstack([z(drivers)[:, [1 - j]], layers])
        inflation = 1 / (1 - least_squares(rest, z(drivers)[:, j])[1])
        assert fit.loc[name, "vif"] == pytest.approx(inflation, rel=1e-9)
    if len(names) > 1:
        assert fit.loc["layer", "r2_alone"] == pytest.approx(least_squares(layers, z(y))[1], rel=1e-9)
    assert ("layer" in fit.index) == (len(names) > 1)
    assert fit["tokens"].tolist() == [len(y)] * len(fit)
    assert fit["prompts"].tolist() == [20] * len(fit)


@pytest.mark.usefixtures("few_prompts_are_many")
@pytest.mark.parametrize("names", [["act_grad_norm.0"], NORMS[:2]])
def test_bounds_are_those_of_whole_prompts_redrawn_one_by_one_and_standardised_anew(names):
    table = make_table(0.8, 0.3, prompts=6)
    draw = rng(3)
    draws = draw.multinomial(6, [1 / 6] * 6, size=40)
    if len(names) > 1:  # its turn comes after the three quantities on their own
        draws = [draw.multinomial(6, [1 / 6] * 6, size=40) for _ in range(3)][-1]
    answers = []
    for counts in draws:
        redrawn = pd.concat([table[table["group"] == g] for g, n in enumerate(counts) for _ in range(n)])
        drivers, layers, y = design(redrawn, names)
        first, second = least_squares(np.hstack([z(drivers), layers]), z(y))[0][:2]
        answers.append((first, second, abs(first) - abs(second)))
    found = regress_norms(table, seed=rng(3), resamples=40, confidence=0.8)
    fit = found[found["quantity"] == (POOLED if len(names) > 1 else names[0])]
    lower, upper = np.quantile(answers, [0.1, 0.9], axis=0)
    assert fit["lower"].iloc[:3].tolist() == pytest.approx(lower.tolist(), rel=1e-8)
    assert fit["upper"].iloc[:3].tolist() == pytest.approx(upper.tolist(), rel=1e-8)


@pytest.mark.parametrize("quantity", ["act_grad_norm.0", "param_grad_norm", POOLED])
@pytest.mark.parametrize(("planted", "other"), [X, X[::-1]])
def test_norms_that_depend_on_one_driver_alone_are_said_to_though_both_are_correlated(quantity, planted, other):
    depends = {"log_one_minus_prob": (1.0, 0.0), "entropy": (0.0, 1.0)}[planted]
    fit = rows_of(make_table(*depends, prompts=40), quantity, resamples=300)
    assert fit.loc[other, "r2_alone"] > 0.05 or quantity == POOLED  # alone, it seems to explain some
    assert fit.loc[planted, "lower"] > 0.4
    assert abs(fit.loc[other, "coefficient"]) < 0.05
    assert fit.loc[other, "lower"] < 0.02 and fit.loc[other, "upper"] > -0.02
    sign = 1 if planted == "log_one_minus_prob" else -1
    difference = fit.loc["difference"]
    assert sign * difference["coefficient"] > 0.4 and difference["lower"] * difference["upper"] > 0
    coefficients = fit.loc[X, "coefficient"].abs()
    assert difference["coefficient"] == pytest.approx(coefficients.iloc[0] - coefficients.iloc[1])
    assert not fit["collinear"].any()


def test_drivers_that_cannot_be_told_apart_are_said_to_be_so_rather_than_answered():
    close = make_table(mix=0.99)
    expected = 1 / (1 - np.corrcoef(close["log_one_minus_prob"], close["entropy"])[0, 1] ** 2)
    fit = rows_of(close, "param_grad_norm")
    assert fit["vif"].tolist()[:2] == pytest.approx([expected] * 2, rel=1e-9) and expected > 10
    assert fit["collinear"].all()
    assert fit[["coefficient", "lower", "upper"]].isna().all(axis=None)
    assert (fit["r2"] > 0.5).all() and (fit.loc[X, "r2_alone"] > 0.5).all()
    told = rows_of(close, "param_grad_norm", max_vif=1.01 * expected)
    assert told[["coefficient", "lower", "upper"]].notna().all(axis=None) and not told["collinear"].any()

    copy = rows_of(close.assign(entropy=2 * close["log_one_minus_prob"] + 1), "param_grad_norm", max_vif=1e9)
    assert np.isinf(copy.loc[X, "vif"]).all() and copy["collinear"].all()
    assert copy["r2"].iloc[0] == pytest.approx(copy.loc["entropy", "r2_alone"], rel=1e-9)


def test_a_driver_that_does_not_vary_has_no_coefficient_and_leaves_the_other_its_own():
    table = make_table(prompts=10)
    fit = rows_of(table.assign(entropy=0.1), "param_grad_norm")
    drivers, _, y = design(table, ["param_grad_norm"])
    assert fit.loc["log_one_minus_prob", "coefficient"] == pytest.approx(np.corrcoef(drivers[:, 0], y)[0, 1], rel=1e-9)
    assert fit.loc["log_one_minus_prob", "lower"] < fit.loc["log_one_minus_prob", "upper"]
    assert (
        fit.loc[["entropy", "difference"], ["coefficient", "lower", "upper", "r2_alone", "vif"]].isna().all(axis=None)
    )
    same = rows_of(table.assign(param_grad_norm=2.0), "param_grad_norm")
    assert same[["coefficient", "lower", "r2_alone", "r2"]].isna().all(axis=None)


def test_one_prompt_has_coefficients_without_bounds_and_three_tokens_say_nothing():
    table = make_table(prompts=10)
    one = rows_of(table.assign(group=4), "param_grad_norm")
    assert one["coefficient"].notna().all() and one[["lower", "upper"]].isna().all(axis=None)
    batches = rows_of(table.assign(group=4, batch=np.arange(len(table)) % 6), "param_grad_norm")
    assert batches["prompts"].tolist() == [6] * 3 and batches["lower"].notna().all()
    holes = table.copy()
    holes.loc[3:, "act_grad_norm.0"] = np.nan
    few = rows_of(holes, "act_grad_norm.0")
    assert few["tokens"].tolist() == [3] * 3
    assert few[["coefficient", "lower", "upper", "r2_alone", "r2", "vif"]].isna().all(axis=None)
    assert not few["collinear"].any()


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (" knight", "word"), ("é", "word"), ("三", "word"), ("x1", "word"), ("'s", "word"),
        (" 12", "digit"), ("½", "digit"), ("3.", "digit"), (".", "punctuation"), (" (", "punctuation"),
        ("�", "punctuation"), ("+", "punctuation"), ("\n\n", "space"), (" \t", "space"), ("", "space"),
        ("<s>", "special"), ("1", "special"),
    ],
)  # fmt: skip
def test_a_tokens_class_is_that_of_what_it_holds_unless_it_is_special(token, expected):
    tokens = pd.Series([token, "a", token], index=[3, 1, 3])
    found = token_classes(tokens, {"<s>", "1"})
    assert found.tolist() == [expected, "word", expected]
    assert found.index.tolist() == [3, 1, 3]
    assert found.cat.categories.tolist() == ["word", "digit", "punctuation", "space", "special"]


def make_movements(size: int = 400) -> pd.DataFrame:
    draw = rng(1)
    table = pd.DataFrame({"group": draw.integers(0, 10, size), "entropy": draw.gamma(0.5, size=size)})
    table["position"] = draw.permutation(size) // 2
    table["advantage"] = draw.choice([-1.5, 0.0, 0.5, np.nan], size=size)
    table["token"] = draw.choice(["a", "1", "(", " "], size=size)
    table["delta_log_odds.all"] = table["delta_prob.all"] = draw.normal(size=size)
    return table


def test_bins_hold_equally_many_tokens_in_order():
    table = make_movements()
    found = add_drivers(table, classes=5)
    for name in ("entropy", "position"):
        code = found[f"{name}_class"].cat.codes
        assert np.bincount(code).tolist() == [80] * 5
        for low, high in ((i, i + 1) for i in range(4)):
            assert table.loc[code == low, name].max() < table.loc[code == high, name].min()
    assert found["position_class"].cat.categories.tolist()[0] == "[0, 40)"
    assert found["position_class"].cat.categories.tolist()[-1] == "[160, 199]"
    assert found[table.columns].equals(table)


def test_ties_leave_fewer_bins_and_what_is_unknown_has_none():
    table = make_movements().assign(entropy=[0.0] * 390 + [np.nan] * 5 + [1.0] * 5)
    found = add_drivers(table)["entropy_class"]
    assert found.isna().tolist() == table["entropy"].isna().tolist()
    assert found.cat.categories.tolist() == ["[0, 1]"]
    assert add_drivers(table.assign(entropy=0.5))["entropy_class"].unique().tolist() == ["0.5"]
    assert add_drivers(table.iloc[:1])["position_class"].notna().all()


def test_signs_and_classes_are_the_tokens_own():
    table = make_movements()
    found = add_drivers(table, special={"("})
    words = {-1.5: "negative", 0.0: "zero", 0.5: "positive"}
    assert [words.get(a, "unknown") for a in table["advantage"]] == found["advantage_sign"].astype(object).fillna(
        "unknown"
    ).tolist()
    assert found["token_class"].equals(token_classes(table["token"], {"("}))
    assert "token_class" not in add_drivers(table.drop(columns="token"))


@pytest.mark.parametrize("by", ["entropy_class", "position_class", "advantage_sign", "token_class"])
def test_every_driver_makes_the_rows_of_the_statistics(by):
    table = add_drivers(make_movements())
    shares = right_direction_shares(table, by=by, seed=rng(), resamples=20)
    assert shares[by].tolist() == [c for c in table[by].cat.categories for _ in range(2)]
    for row in shares.itertuples():
        here = table[(table[by] == row[1]) & (np.sign(table["advantage"]) == (1 if row.sign == "positive" else -1))]
        assert row.num_tokens == len(here)
