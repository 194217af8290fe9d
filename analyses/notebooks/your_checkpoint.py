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
# dominate my updates, where, and what would a step do? Put your two paths below. As it stands, the notebook samples a
# small dump from gradscope's own policy, in the native format.
#
# In Colab, set `WHEEL` first, and restart the runtime if Colab asks for it. No GPU is needed.

# %%
import subprocess
import sys

WHEEL = ""  # "https://…/gradscope-0.3.0-py3-none-any.whl"; empty where gradscope is installed
if WHEEL:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", WHEEL], check=True)

# %%
import tempfile
from pathlib import Path

import gradscope
from gradscope.rollouts import write_rollouts

OUT = Path(tempfile.mkdtemp(prefix="gradscope-"))
CHECKPOINT = "embedded"  # "my-trl-run/checkpoint-500", or from the hub "HuggingFaceTB/SmolLM2-135M-Instruct", …
TASK, MAX_NEW_TOKENS = "knights-knaves-compact", 128  # "word-problems-examples", 48 for a small pretrained model
ROLLOUTS = OUT / "rollouts.jsonl"  # "my-trl-run/completions", "rollout_data_dir", …

policy = gradscope.load_policy(CHECKPOINT)
if not ROLLOUTS.exists():
    wanted = {"questions": 6, "n": 4, "temperature": 0.7, "max_new_tokens": MAX_NEW_TOKENS}
    write_rollouts(ROLLOUTS, gradscope.sample(policy, task=TASK, **wanted, seed=3))

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
# `minutes` limits the time: where measuring every token would take longer, a random sample is measured. The step is
# AdamW's, from your optimizer state, if you give its file (`optimizer_state="…/optimizer.pt"`), else the paper's SGD.

# %%
diagnosis = gradscope.diagnose(policy, batch, minutes=3, resamples=200)
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
from gradscope.diagnosis import PARTS
from gradscope.plots import save_figure

figure = PARTS["dominance"].draw(diagnosis)
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
