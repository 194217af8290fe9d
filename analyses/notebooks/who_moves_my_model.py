# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Who moves my model?
#
# A token can be large without being left in the sum, and left in the sum without any other prompt wanting it.
# `gradscope diagnose` writes all three of every token into `tokens.parquet`, so each question is a sum over rows. The
# table here is SmolLM2-135M-Instruct's on word problems, as the following command wrote it (ten minutes on two cores):
#
#     gradscope diagnose smollm2 --rollouts rollouts.jsonl --minutes 10 --out report

# %%
from pathlib import Path

import numpy as np
import pandas as pd

import gradscope

KEPT = "docs/notebooks/who_moves_my_model.parquet"
places = (Path.cwd(), *Path.cwd().parents, Path(gradscope.__file__).parents[1])
here = next(folder for folder in places if (folder / KEPT).is_file())
table = pd.read_parquet(here / KEPT)
print(f"{len(table):,} tokens of {table['response'].nunique()} responses to {table['group'].nunique()} prompts")
table[["token", "prob", "weight", "gradient_share", "own_share", "signal"]].head()

# %% [markdown]
# `gradient_share` is c_t = w_t⟨g_t, G⟩/‖G‖²: the token's product with the whole gradient G. The shares add up to 1, and
# a negative one works against the update.

# %%
shares = table["gradient_share"].sort_values(ascending=False)
print(f"all: {shares.sum():.4f}; against the update: {shares[shares < 0].sum():.3f}")
print(f"{(shares.cumsum() < 0.5).sum() + 1} of {len(shares):,} tokens hold half of it")
table.loc[shares.index[:8], ["response", "token", "prob", "advantage", "gradient_share", "own_share"]]

# %% [markdown]
# `own_share` is the part of it that is a product with the token's own prompt, among it the product with itself. What is
# left is a product with the other prompts. Over all tokens that is what the prompts share; the page gives it bounds,
# and of these thirteen prompts it is not told from 0: this update is, as far as can be seen, what each prompt wants for
# itself.

# %%
own, others = table["own_share"].sum(), (table["gradient_share"] - table["own_share"]).sum()
print(f"prompts with themselves {own:.1%}, with each other {others:.1%} of the squared norm")

# %% [markdown]
# ## Which words?
#
# Any grouping is a `groupby`. Single tokens are not ranked by `signal`: for one token it is noise.

# %%
columns = {"tokens": ("token", "size"), "gradient": ("gradient_share", "sum"), "own": ("own_share", "sum")}
words = table.groupby("token").agg(**columns).assign(others=lambda frame: frame["gradient"] - frame["own"])
words[words["tokens"] >= 3].sort_values("gradient", key=np.abs, ascending=False).head(10).round(3)

# %% [markdown]
# ## Large, in the sum, wanted
#
# By interval of π, beside the share of the tokens and (where norms were measured) of the energy Σ‖w·g‖².

# %%
by = table.groupby("interval")
chance = table.get("sampling_probability", 1.0)
energy = (table["weight"] * table["param_grad_norm"]) ** 2 / chance
pd.DataFrame(
    {
        "of the tokens": by.size() / len(table),
        "of the energy": energy.groupby(table["interval"]).sum() / energy.sum(),
        "of the gradient": by["gradient_share"].sum(),
        "with other prompts": by["gradient_share"].sum() - by["own_share"].sum(),
    }
).round(3)

# %% [markdown]
# ## Which prompts?
#
# A prompt's own part is ‖G_p‖²/‖G‖². A few prompts with long gradients make the update; the effective number of prompts
# says how few.

# %%
prompts = table.groupby("group")["own_share"].sum().sort_values(ascending=False)
print(f"{prompts.sum() ** 2 / (prompts**2).sum():.1f} effective prompts of {len(prompts)}")
prompts.head().round(3)
