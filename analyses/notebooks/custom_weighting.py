# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A weighting scheme of your own, before you train with it
#
# An RL update gives each token a scalar weight. What another weighting would do can be asked of *one* measurement,
# without a training run: sizes are arithmetic on the table's columns, directions are a few backward passes, and a step
# can be taken and rewound. Here: train only the 20 %, or 5 %, of tokens with the largest entropy, beside GRPO, Reweight
# and Lopti.

# %%
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

import gradscope
from gradscope.gradients import gram, weighted_gradients
from gradscope.objective import (
    PAPER,
    batch_weights,
    lopti_split,
    resolve_advantages,
    reweight,
    split_passes,
    whole_passes,
)
from gradscope.sampling import batch_rows, rollout_rows
from gradscope.tasks import draw_questions, get_task
from gradscope.updates import Variant, right_direction_shares

policy = gradscope.load_policy("embedded")
task = get_task("knights-knaves-compact")
rows = rollout_rows(
    policy, draw_questions(task, 5, seed=2), task=task, n=4, temperature=0.7, max_new_tokens=128, seed=2
)
batch = batch_rows(rows, on_policy=False)  # with the sampler's log π_old
batch = replace(batch, advantages=resolve_advantages(batch))
table = gradscope.measure(policy, batch)

# %% [markdown]
# ## The scheme, in ten lines
#
# A scheme is a factor on each token's advantage, [responses, columns] like all tensors of a batch. `spread` puts a
# column of the table there: the table's rows are the batch's response tokens, in order.


# %%
def spread(column):
    out = torch.zeros(batch.response_mask.shape)
    return out.masked_scatter(batch.response_mask, torch.tensor(column.to_numpy(), dtype=torch.float32))


def entropy_mask(share):
    return spread((table["entropy"] >= table["entropy"].quantile(1 - share)).astype(float))


ones = torch.ones_like(batch.old_logprobs)
low, high = lopti_split(batch.old_logprobs, batch.response_mask, eta=0.5)
factors = {"GRPO": ones, "Reweight": reweight(ones, batch.old_logprobs, alpha=0.3)}
factors |= {"entropy 20 %": entropy_mask(0.2), "entropy 5 %": entropy_mask(0.05)}

# %% [markdown]
# ## Sizes: from the table alone
#
# The share of Σ‖w·g‖ that each interval of π has under each scheme. Lopti changes no size: it parts GRPO's tokens into
# two steps.


# %%
def size_shares(factor):
    kept = factor[batch.response_mask].numpy()
    size = np.abs(table["weight"] * kept) * table["param_grad_norm"]
    return size.groupby(table["interval"]).sum() / size.sum()


sizes = pd.DataFrame({name: size_shares(factor) for name, factor in factors.items()})
sizes.round(3)

# %% [markdown]
# ## Directions: one backward pass per scheme
#
# The gradient of the loss is −Σ w·∇ log π / num_tokens, and `weighted_gradients` sums token gradients with any weights
# you like. The last two rows are Lopti's passes.

# %%
names = [*factors, "low", "high"]
chosen = [*factors.values(), low, high]
weights = [
    batch_weights(
        batch.old_logprobs, replace(batch, advantages=batch.advantages * factor), PAPER, num_tokens=batch.num_tokens
    ).policy
    for factor in chosen
]
seeds = -torch.stack(weights) / batch.num_tokens
gradients = weighted_gradients(policy.model, batch, seeds, micro_batch_size=8)

# %% [markdown]
# A step of SGD goes against the gradient. To first order Lopti's two steps then add up to GRPO's one: what sets them
# apart, in a small step, is the optimizer. AdamW divides each step by its own size, so that the pass with the small
# gradient goes as far as the other. So we ask both, AdamW from fresh moments.


# %%
def sgd_step(*passes):
    return -sum(passes)


def adamw_step(*passes):
    moved = torch.zeros_like(passes[0]).requires_grad_()
    optimizer = torch.optim.AdamW([moved], lr=1.0, weight_decay=0.0)
    for gradient in passes:
        moved.grad = gradient.clone()
        optimizer.step()
    return moved.detach()


by_name = dict(zip(names, gradients, strict=True))
updates = {name: [by_name[name]] for name in factors} | {"Lopti": [by_name["low"], by_name["high"]]}


def cosines(step):
    directions = torch.stack([step(*passes) for passes in updates.values()])
    products = gram(directions)
    return (products[0] / (products[0, 0] * products.diag()).sqrt()).tolist()


cosine = pd.DataFrame({"SGD": cosines(sgd_step), "AdamW": cosines(adamw_step)}, index=list(updates))
cosine.round(3)  # with GRPO's update

# %% [markdown]
# The mask of 20 % hardly turns this policy's gradient: most of its tokens are nearly certain, and what is left out had
# next to no gradient to begin with. Whether a mask *can* matter is the first thing to ask of it.
#
# ## What a real step does
#
# `apply_updates` takes each step with the trainer's own code, looks at every token, and puts the weights back, bit for
# bit. A scheme of your own is a `Variant`: its passes, of a batch with your advantages. The step is the paper's (SGD,
# 1e-3), unless you pass `step=` and your run's `optimizer_state=`.


# %%
def variant(name, factor):
    changed = replace(batch, advantages=batch.advantages * factor)
    return Variant(name, whole_passes(changed, len(batch)), PAPER)


variants = [variant(name, factor) for name, factor in factors.items()]
variants.append(Variant("Lopti", split_passes(batch, len(batch), [("low", low), ("high", high)]), PAPER))
movements = gradscope.apply_updates(policy, batch, variants)
movements

# %% [markdown]
# Of the tokens with a positive advantage, the share that rose, by interval of π_old (Fig. 3 of the paper). One batch
# of five puzzles is far too little to rank schemes: the bounds, over puzzles, say how far.

# %%
moved = gradscope.movement_table(movements)
rng = np.random.default_rng(0)
shares = {m.name: right_direction_shares(moved, name=m.name, rng=rng, resamples=200) for m in movements}
directions = pd.concat(shares, names=["scheme"]).query("sign == 'positive'").reset_index("scheme")
directions.pivot(index="interval", columns="scheme", values=["share", "lower", "upper"]).round(2)
