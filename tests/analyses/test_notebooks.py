"""The notebooks run from top to bottom, and some of what they show is computed here again, by simpler means."""

import pickle
import re

import numpy as np
import pytest
import torch
from support.processes import Command

import gradscope
from gradscope.objective.equations import grpo_advantages
from gradscope.updates import describe

SHOWN = {
    "first_look": ("batch", "table", "by_interval", "largest"),
    "custom_weighting": ("rows", "table", "found"),
    "who_moves_my_model": ("table", "words", "prompts"),
    "your_checkpoint": ("batch", "diagnosis"),
}
"""Notebook → the variables that are looked at."""

RUN = """
import os, pickle, re, sys, types, warnings
source, names, out, folder = sys.argv[1:]
os.chdir(folder)
warnings.simplefilter("error")
cells = re.split(r"^# %%.*$", open(source, encoding="utf-8").read(), flags=re.MULTILINE)
sys.modules["notebook"] = types.ModuleType("notebook")  # where its classes say that they are from
values = vars(sys.modules["notebook"])
for number, cell in enumerate(cells):
    exec(compile(cell, f"{source}, cell {number}", "exec"), values)
with open(out, "wb") as file:
    pickle.dump({name: values[name] for name in names.split(",")}, file)
"""
"""What Jupyter does: one cell after the other, in one namespace of a fresh process."""


@pytest.fixture(scope="module")
def executed(repository, tmp_path_factory):
    """name → the variables of that notebook after its last cell; each is executed once."""
    folder, results = tmp_path_factory.mktemp("notebooks"), {}

    def run(name):
        if name not in results:
            out = folder / f"{name}.pickle"
            source = repository / "analyses" / "notebooks" / f"{name}.py"
            done = Command("-c", RUN, source, ",".join(SHOWN[name]), out, folder, TMPDIR=str(folder)).wait()
            assert done.status == 0, done.stderr
            results[name] = pickle.loads(out.read_bytes()) | {"printed": done.stdout}
        return results[name]

    return run


@pytest.fixture(scope="module")
def model():
    return gradscope.load_policy("embedded").model.eval()


def logprobs(model, row):
    """log π of a row's response tokens, by the plainest way."""
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / row["temperature"]
    return logits.log_softmax(-1).gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]


def advantages_of(rows):
    rewards, groups = (torch.tensor([row[name] for row in rows]) for name in ("reward", "group"))
    return grpo_advantages(rewards.float(), groups)


def test_every_notebook_is_looked_at_and_holds_no_output(repository):
    files = {path.stem: path for path in (repository / "analyses" / "notebooks").iterdir() if path.is_file()}
    assert sorted(files) == sorted(SHOWN) and all(path.suffix == ".py" for path in files.values())
    for path in files.values():
        cells = re.findall(r"^# %%(.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert cells.count(" [markdown]") >= 4 and cells.count("") >= 5


@pytest.mark.all
def test_the_largest_token_of_the_first_look_has_the_norm_that_autograd_finds(executed, model):
    found = executed("first_look")
    top = found["largest"].iloc[0]
    rows = list(found["batch"].rows())
    row = rows[int(top["response"])]
    model.zero_grad()
    logprobs(model, row)[int(top["position"])].backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm()
    size = float(norm) * abs(float(advantages_of(rows)[int(top["response"])]))
    assert top["size"] == pytest.approx(size, rel=1e-4)  # float32 sums over 0.8 M parameters, in two orders
    assert top["size"] == found["table"]["size"].max()


@pytest.mark.all
def test_weightings_are_compared_by_energies_that_a_loop_over_tokens_finds(executed):
    found = executed("custom_weighting")
    table, comparison = found["table"], found["found"]
    threshold = np.quantile(table["entropy"].astype(float), 0.95)
    sums = {"grpo": [0.0] * 4, "reweight": [0.0] * 4, "hopeful:q=0.05": [0.0] * 4}
    for token in table.itertuples():
        size = (token.policy_weight * token.param_grad_norm) ** 2
        sums["grpo"][token.interval] += size
        sums["reweight"][token.interval] += size * (0.3 * np.exp(token.old_logprob) + 0.7) ** 2
        sums["hopeful:q=0.05"][token.interval] += size * (token.entropy >= threshold and token.advantage > 0)
    for name, expected in sums.items():
        own = comparison.by_interval.set_index("method").loc[name, "energy_share"]
        np.testing.assert_allclose(own, np.array(expected) / sum(expected), atol=1e-5)  # float32
    assert describe(comparison) in found["printed"]


@pytest.mark.all
def test_your_checkpoint_is_diagnosed_on_the_dump_that_was_read(executed):
    found = executed("your_checkpoint")
    diagnosis, rows = found["diagnosis"], list(found["batch"].rows())
    assert diagnosis.num_responses == len(rows) and diagnosis.num_prompts == len({row["group"] for row in rows})
    assert len(diagnosis.table) == sum(len(row["response_ids"]) for row in rows)
    probs = np.exp([x for row in rows for x in row["old_logprobs"]])
    share = diagnosis.pick("token_share", interval="[0, ¼)")["value"]
    # The dump keeps the sampler's π, the table its own: a token may lie on the other side of ¼ by a rounding.
    assert share == pytest.approx(np.mean(probs < 0.25), abs=1.5 / len(probs))
    assert "okens with π < ¼" in repr(diagnosis)


def test_words_and_prompts_have_the_shares_of_their_tokens(executed):
    found = executed("who_moves_my_model")
    table, words, prompts = (found[name] for name in ("table", "words", "prompts"))
    assert table["gradient_share"].sum() == pytest.approx(1.0, rel=1e-4) == words["gradient"].sum()
    for token in words.index[:5]:
        own = table[table["token"] == token]
        assert words.loc[token, "others"] == pytest.approx((own["gradient_share"] - own["own_share"]).sum(), abs=1e-6)
    assert f"{prompts.sum() ** 2 / (prompts**2).sum():.1f} effective prompts" in found["printed"]
