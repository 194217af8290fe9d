# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A first look at a policy
#
# Which tokens does the next update of this policy follow? We sample a few responses, measure the gradient of every
# token of them, and look. The policy is the one that comes with gradscope: a small Llama that reasons about Knights &
# Knaves puzzles. Any checkpoint folder of transformers works in its place.

# %%
import tempfile
from pathlib import Path

import numpy as np

import gradscope
from gradscope import plots
from gradscope.diagnosis import describe_summary, summarize
from gradscope.gradients import MeasureSettings

OUT = Path(tempfile.mkdtemp(prefix="gradscope-"))  # pictures and tables go here

# %% [markdown]
# ## Sample
#
# Four responses to each of four puzzles, at the temperature that the policy was trained for. The task grades them, and
# the advantages are GRPO's within each puzzle's group.

# %%
policy = gradscope.load_policy("embedded")
wanted = {"questions": 4, "n": 4, "temperature": 0.7, "max_new_tokens": 128}
batch = gradscope.sample(policy, task="knights-knaves-compact", **wanted, seed=1)
print(policy.decode(batch.sequence(0)[0].tolist()))

# %% [markdown]
# `reward` is the paper's: 3 for a right answer, −0.5 for a wrong one in the right form. A group whose rewards are all
# equal has advantages of 0: it teaches nothing.

# %%
batch.rewards.tolist()

# %% [markdown]
# ## Measure
#
# One row per sampled token. `param_grad_norm` is the norm of the gradient of that token's own log π over all
# parameters; `weight` is what the algorithm puts before it (Eq. 2 of the paper), so that `|weight| · param_grad_norm`
# is the size of what the token adds to the update.

# %%
table = gradscope.measure(policy, batch)
columns = ["token", "prob", "entropy", "advantage", "weight", "logit_grad_norm", "param_grad_norm"]
table[columns].head(10)

# %% [markdown]
# By probability, in the paper's four intervals: the rarer the token, the larger its gradient.

# %%
by_interval = table.groupby("interval")["param_grad_norm"].agg(["size", "mean", "median"])
by_interval

# %% [markdown]
# At the logits that is algebra: the norm lies between √(N/(N−1)) and √2 times 1 − π (Prop. 4.2). Below the head it is
# a question to the network, which the summary answers for this one.

# %%
ratio = table["logit_grad_norm"] / np.exp(table["log_one_minus_prob"])
print(f"norm at the logits over 1 − π: {ratio.min():.4f} to {ratio.max():.4f}")

# %%
found = summarize(policy, batch, table, MeasureSettings())
print(describe_summary(found))

# %% [markdown]
# ## Look
#
# Fig. 1 of the paper for this policy: token shares, advantages, and the norm of the gradient that each interval's
# tokens have together. A sum is not the sum of its parts' sizes: tokens of one interval may point in many directions.

# %%
sums = gradscope.interval_gradients(policy, batch)
figure = plots.plot_figure_1(table, sums.table)
plots.save_figure(figure, OUT / "figure_1.png")
figure

# %%
axes = plots.plot_layers_by_interval(table)
plots.save_figure(axes, OUT / "layers_by_interval.png")
axes.figure

# %% [markdown]
# The largest tokens, with what surrounds them in the table, are a good next question: are they forks in the
# reasoning, slips, or noise?

# %%
table["size"] = table["weight"].abs() * table["param_grad_norm"]
largest = table.nlargest(8, "size")[["response", "position", "token", "prob", "advantage", "size"]]
largest

# %% [markdown]
# The viewer shows them in their responses, each token shaded by what it adds to the update.

# %%
gradscope.viewer(table, batch=batch, tokenizer=policy.tokenizer)
