# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A weighting of your own, before you train with it
#
# An RL update gives each token a scalar weight. What another weighting would do can be asked of *one* batch, without a
# training run: whose gradients the update is made of, its norm and direction, how much of it is signal. Here: only the
# tokens with the largest entropy *and* a positive advantage, beside GRPO, Reweight, Lopti and the 80/20 mask.

# %%
from dataclasses import dataclass, replace

import numpy as np

import gradscope
from gradscope.objective import Tokens, Weighting, resolve_advantages, within
from gradscope.plots import plot_comparison
from gradscope.sampling import batch_rows, rollout_rows
from gradscope.tasks import draw_questions, get_task
from gradscope.updates import describe

policy = gradscope.load_policy("embedded")
task = get_task("knights-knaves-compact")
rows = rollout_rows(
    policy, draw_questions(task, 12, seed=2), task=task, n=4, temperature=0.7, max_new_tokens=128, seed=2
)
batch = batch_rows(rows, on_policy=False)  # with the sampler's log π_old
batch = replace(batch, advantages=resolve_advantages(batch))
table = gradscope.measure(policy, batch)

# %% [markdown]
# ## The weighting, in ten lines
#
# A weighting gives w_t of each token from the columns of the token table; `tokens.plain` is GRPO's r·Â·I. In a file of
# its own it is `path/to/file.py:hopeful:q=0.1` for `gradscope compare` and `gradscope train --method`.


# %%
@dataclass(frozen=True)
class Hopeful(Weighting):
    """w = plain where Â > 0 and H is at least its (1 − q) quantile, else 0."""

    NAME = "hopeful"
    q: float = within(0.2, 0, 1)

    def factors(self, tokens: Tokens) -> np.ndarray:
        entropy = tokens.known("entropy")
        return np.where((entropy >= np.quantile(entropy, 1 - self.q)) & (tokens.advantage > 0), tokens.plain, 0.0)


# %% [markdown]
# ## What it would do

# %%
settings = gradscope.ComparisonSettings(resamples=200)
weightings = ["reweight", "lopti", "top-entropy", Hopeful(), Hopeful(q=0.05)]
found = gradscope.compare(policy, batch, weightings, table=table, settings=settings)
found

# %% [markdown]
# `cosine_from_energies` is the cosine with GRPO's update that the tokens' energies alone would give, if their gradients
# were orthogonal: Reweight's weights all lie in [.7, 1], so that it is at least .984 whatever the energies. The 20 %
# mask leaves out tokens that hold energy: most of its cosine is what they held, the rest is how the gradients lie to
# one another. What a mask leaves out is the first thing to ask of it.

# %%
plot_comparison(found.table, found.by_interval, found.labels)

# %%
print(describe(found))

# %% [markdown]
# Five puzzles are far too few to tell signal from noise, and for intervals.
