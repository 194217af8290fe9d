# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Your own checkpoint
#
# A checkpoint folder of transformers and the rollouts that your trainer wrote down are enough to ask: do rare tokens
# dominate my updates, where, and what would a step do? Put your two paths here. As it stands, the notebook makes itself
# a small dump with the policy of gradscope, in the native format.

# %%
import tempfile
from pathlib import Path

import gradscope
from gradscope.rollouts import write_rollouts

OUT = Path(tempfile.mkdtemp(prefix="gradscope-"))
CHECKPOINT = "embedded"  # "runs/grpo/checkpoints/step-000020", "my-trl-run/checkpoint-500", …
ROLLOUTS = OUT / "rollouts.jsonl"  # "my-trl-run/completions", "rollout_data_dir", …

policy = gradscope.load_policy(CHECKPOINT)
if not ROLLOUTS.exists():
    wanted = {"questions": 6, "n": 4, "temperature": 0.7, "max_new_tokens": 128}
    write_rollouts(ROLLOUTS, gradscope.sample(policy, task="knights-knaves-compact", **wanted, seed=3))

# %% [markdown]
# ## Read the dump
#
# The trainer's format is told by its columns. What a dump does not carry is said, not guessed in silence: read the
# notes.

# %%
dump = gradscope.read_dump(ROLLOUTS, policy)
batch = dump.batch
print(f"{dump.format}: {len(batch)} responses, {batch.num_tokens} response tokens", *dump.notes, sep="\n")

# %% [markdown]
# ## Diagnose
#
# `tokens_per_interval` measures a random sample of tokens, which is what a long rollout wants. Steps are AdamW's
# from your optimizer state if you give its file (`optimizer_state="…/optimizer.pt"`), else the paper's SGD.

# %%
diagnosis = gradscope.diagnose(policy, batch, tokens_per_interval=100, resamples=200)
diagnosis

# %% [markdown]
# Every number behind a sentence is a row of `statistics`, with its interval over prompts.

# %%
diagnosis.statistics.head(12)

# %%
print(*diagnosis.notes, sep="\n")

# %% [markdown]
# ## Pictures

# %%
from gradscope.diagnosis.plots import plot_dominance
from gradscope.plots import save_figure

figure = plot_dominance(diagnosis.statistics, diagnosis.labels)
save_figure(figure, OUT / "dominance.png")
figure

# %% [markdown]
# ## The page
#
# All of it as one HTML file, with a viewer of the tokens; open it in a browser, or send it to somebody.

# %%
page = diagnosis.to_html(OUT / "report.html", title=f"Diagnosis of {CHECKPOINT}", notes=dump.notes)
print(f"{page.stat().st_size / 1e6:.1f} MB: {page}")

# %% [markdown]
# `diagnosis.table` is the token table: keep it, and ask your own questions of it later.

# %%
diagnosis.table.to_parquet(OUT / "tokens.parquet")
sorted(path.name for path in OUT.iterdir())
