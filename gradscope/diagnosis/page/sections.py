"""Sections of a diagnosis's page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isnan

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from gradscope import plots
from gradscope.diagnosis import plots as plot_diagnosis
from gradscope.diagnosis.format import (
    as_sentence,
    bits_words,
    name_interval,
    norm_words,
    number_words,
    percent,
    share_words,
    times_words,
)
from gradscope.diagnosis.glossary import DEFINITIONS
from gradscope.diagnosis.gradients import carriers
from gradscope.diagnosis.page.page import KEYS, Block, Definition, Figure, Paragraph, Section, Table
from gradscope.diagnosis.result import REWARD_PART, Diagnosis
from gradscope.diagnosis.words import lack_words
from gradscope.errors import InputError
from gradscope.gradients import ADAMW, LAYER, PARAMETERS
from gradscope.intervals import EDGES
from gradscope.plots import METRICS, drawn_numbers, label_of
from gradscope.policy import Policy
from gradscope.runs import counted
from gradscope.theory import measured_cones, theory_report
from gradscope.updates import ONE_BATCH, WHAT_STAYS, gain_sentence, signal_sentence, weighting_sentences

DATA = "data"
"""Folder, beside the page, of the CSV files."""
PERCENT = "{:.1%}"
OVER_PROMPTS = "95 % over prompts"
SHOWN = (
    *("dominance", "figure-1", "where", "signal", "prompts"),
    *("mismatch", "directions", "entropy", "weightings"),
)
"""Sections that are not folded: what an update serves, and what it does."""
EXTREMES = 3
"""Prompts shown at each end."""
SHARES = ("found", "predicted_held_out")
BASES = ("value", "share", "coefficient", "difference")
"""Columns that `lower` and `upper` may belong to; the first one present counts."""


TOKENS = 'pd.read_parquet("tokens.parquet")'


def redraw(plot: Callable[..., object], *arguments: str, edges: Sequence[int | float] = EDGES) -> str:
    """Return two lines of Python that draw a figure from the files beside the page; edges: given if not default."""
    module = plot.__module__ if plot.__module__.startswith("gradscope.diagnosis") else "gradscope.plots"
    given = [*arguments, *([] if tuple(edges) == tuple(EDGES) else [f"edges={tuple(edges)}"])]
    return f"import pandas as pd; from {module} import {plot.__name__}\n{plot.__name__}({', '.join(given)})"


def csv(name: str) -> str:
    """Return Python that reads a file beside the page."""
    return f'pd.read_csv("{DATA}/{name}.csv")'


class Sheets:
    """Make blocks that show numbers, and collect their tables by CSV file name."""

    def __init__(self) -> None:
        self.tables: dict[str, pd.DataFrame] = {}

    def figure(
        self,
        name: str,
        draw: Callable[[], object],
        caption: str,
        *,
        again: str,
        bars: str = "",
        token_column: str | None = None,
    ) -> Block:
        """Return `draw`'s figure, or a paragraph with its error if these tokens do not suffice.

        again: `redraw`'s code, from the files beside the page. bars: what they show. token_column: known only for
        single tokens, which are in tokens.parquet, and left out of the CSV.
        """
        before = {*plt.get_fignums()}
        try:
            drawing = draw()
        except InputError as error:
            return Paragraph(f"Not drawn: {caption.split('.')[0]} ({error}).")
        finally:  # pyplot forgets it: a page has many, and they are freed with it
            for number in {*plt.get_fignums()} - before:
                plt.close(number)
        numbers = drawn_numbers(drawing)
        if bars and any(numbers[name].notna().any() for name in numbers if str(name).endswith("lower")):
            caption += f" Bars: {bars}."
        if token_column is not None:
            numbers = numbers[numbers[token_column].isna()].dropna(axis=1, how="all")
            caption += " Single tokens are in tokens.parquet."
        self.tables[f"{DATA}/{name}.csv"] = numbers
        return Figure(drawing, caption, f"{DATA}/{name}.csv", again)

    def keep(self, name: str, frame: pd.DataFrame) -> None:
        """Save a frame next to the page, to redraw a figure from."""
        self.tables[f"{DATA}/{name}.csv"] = frame

    def table(
        self,
        name: str,
        frame: pd.DataFrame,
        caption: str,
        columns: Sequence[str] | None = None,
        *,
        folded: bool = False,
        links: bool = False,
    ) -> Table:
        """Add a table with these columns (None: all); its file has all. links: each row links to its token."""
        self.tables[f"{DATA}/{name}.csv"] = frame
        shown = merge_bounds(frame)
        if columns is not None:
            shown = shown[[column for column in columns if column in shown]]
        tokens: tuple[tuple[int, int], ...] = ()
        if links and {*KEYS} <= {*frame}:
            tokens = tuple((int(one), int(other)) for one, other in frame[KEYS].itertuples(index=False))
        shares = [column for column in shown if is_share(str(column)) and is_numeric_dtype(shown[column])]
        names = {column: label_of(str(column)) for column in shown}
        formats = {names[c]: PERCENT for c in shares}
        return Table(shown.rename(columns=names), caption, formats, folded, f"{DATA}/{name}.csv", tokens)


def is_share(column: str) -> bool:
    """Return whether a column holds shares, which are shown in percent."""
    stem = column.removesuffix("_difference")
    return (
        stem.endswith("share")
        or stem.startswith("right_")
        or "_score" in stem
        or stem in ("found", "predicted_held_out")
    )


def merge_bounds(frame: pd.DataFrame) -> pd.DataFrame:
    """Merge each number and its bounds into one column of text."""
    base = next((name for name in BASES if name in frame), None)
    bounds = {name: (f"{name}_lower", f"{name}_upper") for name in frame if f"{name}_lower" in frame}
    if base is not None and "lower" in frame and base not in bounds:
        bounds[base] = ("lower", "upper")
    told = {}
    for name, ends in bounds.items():
        write = share_words if is_share(name) else partial(number_words, significant=3)
        cells = frame[[name, *ends]].set_axis(["value", "lower", "upper"], axis=1)
        told[name] = [write(row) for _, row in cells.iterrows()]
    frame = frame.assign(**told).drop(columns=[end for ends in bounds.values() for end in ends])
    if "quantity" in frame:
        frame = frame.assign(quantity=frame["quantity"].map(label_of))
    if "label" in frame:  # the interval's number is for code
        names = [name_interval(label) if "," in label else label for label in frame["label"]]  # or "all"
        frame = frame.assign(label=names).drop(columns="interval", errors="ignore")
    return frame


def make_sections(d: Diagnosis, policy: Policy, sheets: Sheets) -> tuple[Section, ...]:
    """Make the sections for which this diagnosis has numbers, in page order."""
    made = (
        ("dominance", "Shares by probability interval", _dominance(d, sheets)),
        ("figure-1", "Tokens, advantages, summed gradients", _figure_1(d, sheets)),
        ("theory", "Norms against 1 − π", _theory(d, policy, sheets)),
        ("layers", "Layer by layer", _layers(d, sheets)),
        ("modules", "Module by module", _modules(d, sheets)),
        ("where", "Kinds of tokens, positions, single tokens", _where(d, sheets)),
        ("signal", "Signal, noise and cosines", _signal(d, sheets)),
        ("prompts", "Prompt by prompt", _prompts(d, sheets)),
        ("mismatch", "Sampler against trainer", _mismatch(d, sheets)),
        ("directions", "What one step does", _directions(d, sheets)),
        ("entropy", "What the step does to entropy", _entropy(d, sheets)),
        ("influence", "Influence between intervals", _influence(d, sheets)),
        ("drivers", "Probability or entropy", _drivers(d, sheets)),
        ("proxies", "Cheap proxies of the norm", _proxies(d, sheets)),
        ("weightings", "What each weighting would change", _weightings(d, sheets)),
        ("numbers", "All numbers", _numbers(d, sheets)),
    )
    sections = [Section(name, title, tuple(blocks), name not in SHOWN) for name, title, blocks in made if blocks]
    return tuple(sorted(sections, key=lambda section: section.folded))


def _define(*terms: str) -> list[Block]:
    return [Definition(term, DEFINITIONS[term]) for term in terms]


def make_lead(d: Diagnosis, sheets: Sheets) -> Figure | None:
    """Return the first screen's figure, or None without shares of the gradient energy, or too few prompts for them."""
    if d.pick("squared_share", "raw", d.labels[0]) is None or d.supply.too_few:
        return None
    caption = f"Each probability interval's share {_shares_of(d)}"
    if d.precision is not None:
        caption += f" {as_sentence(d.precision)}"
    if d.num_prompts < d.of_prompts:
        caption += f" These are {d.num_prompts:,} of the {d.of_prompts:,} prompts; four times as many would halve the "
        caption += "intervals, and take four times the minutes."
    draw = lambda: plot_diagnosis.plot_shares(d.statistics, d.labels)  # noqa: E731
    again = redraw(plot_diagnosis.plot_shares, csv("statistics"), repr([*d.labels]))
    drawn = sheets.figure("shares", draw, caption, again=again, bars=OVER_PROMPTS)
    return drawn if isinstance(drawn, Figure) else None


def _shares_of(d: Diagnosis, *, predicted: bool = False) -> str:
    """End a caption with the series that are drawn, and the prompts of each."""
    energy = "of the gradient energy (tokens one by one)"
    energy = f"of what (1−π)² alone predicts, and {energy}" if predicted else f"and {energy}"
    summed = d.pick("gradient_share", "raw", d.labels[0])
    if summed is None or isnan(summed["value"]):
        return f"of the tokens, {energy}, over {counted(d.num_prompts, 'prompt')}."
    left = "of the summed gradient (what is left after they cancel)"
    if d.sums_prompts in (None, d.num_prompts):
        return f"of the tokens, {energy.removeprefix('and ').replace(', and', ',')} and {left}."
    first = f"of the tokens, {energy}, over {counted(d.num_prompts, 'prompt')}"
    return f"{first}; and {left} over {d.sums_prompts:,} of them."


def _dominance(d: Diagnosis, sheets: Sheets) -> list[Block]:
    rows = [_interval_row(d, place) for place in range(len(d.labels))]
    frame = pd.DataFrame(rows).dropna(axis=1, how="all")
    blocks: list[Block] = []
    if d.pick("squared_share", "raw", d.labels[0]) is not None:
        blocks.append(
            sheets.figure(
                "dominance",
                lambda: plot_diagnosis.plot_dominance(d.statistics, d.labels),
                f"Left: each interval's share {_shares_of(d, predicted=True)} Right: log₂ of a share over the share of "
                f"the tokens{'' if d.cosines is None else '; of summed gradients, the share of Σ_a ‖G_a‖²'}.",
                again=redraw(plot_diagnosis.plot_dominance, csv("statistics"), repr([*d.labels])),
                bars=OVER_PROMPTS,
            )
        )
    blocks.append(sheets.table("intervals", frame, "Each probability interval in numbers."))
    terms = ("probability interval", "w", "gradient energy", "summed gradient", "dominance index")
    return blocks + _define(
        *terms, "(1−π)² alone", "index of the summed gradients", "AdamW-preconditioned", "95 % interval"
    )


def _interval_row(d: Diagnosis, place: int) -> dict[str, object]:
    label = d.labels[place]

    def told(statistic: str, metric: str, write: Callable[[pd.Series], str]) -> str | None:
        row = d.pick(statistic, metric, label)
        return None if row is None else write(row)

    return {
        "interval": name_interval(label),
        "tokens": int(d.pick("tokens", "none", label)["value"]),
        "share of the tokens": told("token_share", "none", share_words),
        "share of the gradient energy": told("squared_share", "raw", share_words),
        "times the average per token": told("dominance_index", "raw", times_words),
        f"share of the summed gradient{_of_summed(d)}": told("gradient_share", "raw", share_words),
        "share of the energy, AdamW": told("squared_share", "adamw", share_words),
        f"share of the summed gradient, AdamW{_of_summed(d)}": told("gradient_share", "adamw", share_words),
    }


def _figure_1(d: Diagnosis, sheets: Sheets) -> list[Block]:
    norms = d.statistics[(d.statistics["statistic"] == "gradient_norm") & (d.statistics["metric"] == "raw")]
    if norms.empty:
        draw = lambda: plots.plot_token_shares(d.table, edges=d.settings.edges)  # noqa: E731
        again = redraw(plots.plot_token_shares, TOKENS, edges=d.settings.edges)
        why = "need advantages" if d.pick("squared_share", "raw", d.labels[0]) is None else "need summed gradients"
        words = f"Token shares (Fig. 1 a); the other panels {why}."
        return [sheets.figure("figure_1", draw, words, again=again)]
    bars = pd.DataFrame(
        {"interval": [*map(str, range(len(d.labels))), "all"], "label": norms["interval"], "norm": norms["value"]}
    )
    sheets.keep("gradient_norms", bars)
    return [
        sheets.figure(
            "figure_1",
            lambda: plots.plot_figure_1(d.table, bars.reset_index(drop=True), edges=d.settings.edges),
            "Fig. 1 (a, b, d) of the paper on this batch: how probable the tokens were, their advantages, and the norm "
            f"of each interval's summed gradient, alone and together{_of_summed(d)}. Norms are no shares: gradients "
            "cancel, and G_a of few tokens can be long by chance (see Signal).",
            again=redraw(plots.plot_figure_1, TOKENS, csv("gradient_norms"), edges=d.settings.edges),
        )
    ]


def _of_summed(d: Diagnosis) -> str:
    """Name the prompts of the summed gradients, if others were left out of them."""
    return "" if d.sums_prompts in (None, d.num_prompts) else f" (of {d.sums_prompts:,} of {d.num_prompts:,} prompts)"


def _theory(d: Diagnosis, policy: Policy, sheets: Sheets) -> list[Block]:
    if not any(name.startswith(LAYER) for name in d.table) or d.settings.edges[0] != 0:
        return []
    try:
        theory = theory_report(d.table, None, vocab_size=policy.vocab_size, seed=np.random.default_rng(d.settings.seed))
    except InputError as error:
        return [Paragraph(f"Not drawn: {error}.")]
    depth = sum(name.startswith(LAYER) for name in d.table) - 1
    shown = [f"{LAYER}{layer}" for layer in sorted({0, depth // 2, depth})]
    powers, cones = theory.powers[theory.powers["quantity"].isin([*shown, PARAMETERS])], measured_cones(theory, shown)
    sheets.keep("powers", powers)
    sheets.keep("cones", cones)
    size, over = f"vocab_size={policy.vocab_size}", f"parameters={d.parameters!r}"
    blocks = [
        sheets.figure(
            "figure_2",
            lambda: plots.plot_figure_2(d.table, cones, vocab_size=policy.vocab_size),
            "Fig. 2 of the paper: at the logits the feasible cone of Prop. 4.2, which is a theorem; below them the "
            "span of the measured gains of these same tokens, which they lie in by construction.",
            again=redraw(plots.plot_figure_2, TOKENS, csv("cones"), size),
            token_column="norm",
        ),
        sheets.figure(
            "norm_against_one_minus_prob",
            lambda: plots.plot_norm_against_one_minus_prob(d.table, powers, parameters=d.parameters),
            "Norms against 1 − π with the fitted power, the slope (the theory's is 1), by layer and of all parameters.",
            again=redraw(plots.plot_norm_against_one_minus_prob, TOKENS, csv("powers"), over),
            token_column="norm",
        ),
    ]
    return blocks + _define("Prop. 4.2")


def _layers(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if d.layers is None or not d.layers["quantity"].str.startswith(LAYER).any():
        return []
    sheets.tables[f"{DATA}/layer_norms.csv"] = d.layers
    told = d.layers.assign(told=[norm_words(row) for _, row in d.layers.iterrows()])
    wide = told.pivot(index="quantity", columns="label", values="told").loc[[*dict.fromkeys(d.layers["quantity"])]]
    wide = wide[list(d.labels)].rename(index=label_of, columns=name_interval)
    wide = wide.rename_axis("mean norm").rename_axis(None, axis=1).reset_index()
    return [
        sheets.figure(
            "layers_by_interval",
            lambda: plots.plot_layers_by_interval(d.table, edges=d.settings.edges, parameters=d.parameters),
            "Median norm of the unweighted token gradients by layer and probability interval.",
            again=redraw(plots.plot_layers_by_interval, TOKENS, f"parameters={d.parameters!r}", edges=d.settings.edges),
        ),
        Table(wide, "Mean norms.", csv=f"{DATA}/layer_norms.csv"),
    ]


def _modules(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if d.modules is None or len(d.modules) < 2:
        return []
    caption = (
        "Where in the network this batch's gradient energy is: each module's share of it, summed over all blocks, "
        "next to its share of the parameters."
    )
    draw = lambda: plot_diagnosis.plot_module_shares(d.modules)  # noqa: E731
    again = redraw(plot_diagnosis.plot_module_shares, csv("modules"))
    drawn = sheets.figure("modules_drawn", draw, caption, again=again)
    return [drawn, sheets.table("modules", d.modules, "The same in numbers.", folded=True)]


def _where(d: Diagnosis, sheets: Sheets) -> list[Block]:
    blocks: list[Block] = []
    if d.where is not None:
        sheets.tables[f"{DATA}/where.csv"] = d.where
        kinds = {"token_class": "kind of token", "position_class": "position", "length_class": "response length"}
        for driver, words in kinds.items():
            if (d.where["driver"] == driver).sum() > 1:  # one class alone is all of the batch
                draw = lambda driver=driver: plot_diagnosis.plot_where(d.where, driver)  # noqa: E731
                caption = f"Shares by {words}: of the tokens and of the gradient energy."
                again = redraw(plot_diagnosis.plot_where, csv("where"), repr(driver))
                drawn = sheets.figure(f"where_{driver}", draw, caption, again=again, bars="95 % for all together")
                blocks.append(drawn)
    if d.spikes is not None and len(d.spikes):
        measured = int(d.table[PARAMETERS].notna().sum())
        of = (
            "in this batch"
            if measured == d.of_tokens
            else f"of the {measured:,} measured ({d.of_tokens:,} in the batch)"
        )
        caption = f"The tokens with the largest ‖w·g‖ {of}, linked to the viewer."
        shown = ["response", "position", "token", "reward", *(c for c in d.spikes if c.startswith(REWARD_PART))]
        shown += ["prob", "advantage", "weight", "param_grad_norm", "weighted_norm", "squared_share"]
        blocks.append(sheets.table("spikes", _readable(d.spikes), caption, shown, links=True))
    return blocks


def _signal(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if d.cosines is None:
        return []
    fractions = [d.pick("signal_fraction", "raw", label) for label in (*d.labels, "all")]
    blocks: list[Block] = []
    if all(isnan(row["lower"]) for row in fractions):
        few = d.supply.too_few or f"Signal and noise were not judged: {lack_words(fractions[-1])}."
        blocks.append(Paragraph(few))
    else:
        blocks.append(
            sheets.figure(
                "signal",
                lambda: plot_diagnosis.plot_signal(d.statistics, d.labels),
                f"Share of each interval's ‖G_a‖² that other prompts would share{_of_summed(d)}; 0 is pure noise.",
                again=redraw(plot_diagnosis.plot_signal, csv("statistics"), repr([*d.labels])),
                bars="95 %, a jackknife",
            )
        )
    for name, matrix, words in (
        ("cosines", d.cosines, ""),
        ("adamw_cosines", d.adamw_cosines, ", AdamW-preconditioned"),
    ):
        if matrix is not None:
            draw = lambda matrix=matrix: plots.plot_cosines(matrix, edges=d.settings.edges)  # noqa: E731
            caption = (
                f"Cosines between the intervals' summed gradients{words}{_of_summed(d)}; near 0 if either is noise."
            )
            read = f'{csv(name)}.drop(columns="interval")'
            again = redraw(plots.plot_cosines, read, edges=d.settings.edges)
            blocks.append(sheets.figure(name, draw, caption, again=again))
    return blocks + _define("signal fraction")


def _prompts(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if d.by_prompt is None or len(d.by_prompt) < 2 or d.by_prompt["gradient_share"].isna().any():
        return []
    whole, found = d.by_prompt, d.by_prompt[d.by_prompt["gradient_norm"] > 0]
    if len(found) < 2:
        return []
    half = carriers(found["gradient_share"])
    opposed = found[found["cosine_with_rest"] < 0].sort_values("cosine_with_rest", kind="stable")["group"].tolist()
    told = f"Half of the summed gradient comes from {half:,} of {counted(len(found), 'prompt')}"
    told += "." if len(found) == len(whole) else f" with a gradient; {len(whole) - len(found):,} more have none."
    if opposed:
        names = ", ".join(map(str, opposed[:EXTREMES])) + (", …" if len(opposed) > EXTREMES else "")
        told += (
            f" {len(opposed):,} point{'s' if len(opposed) == 1 else ''} against the rest ({names}); if all gradients "
        )
        told += "were noise, about half of them would."
    extremes = found
    if len(found) > 2 * EXTREMES:
        least = found.iloc[EXTREMES:].nsmallest(EXTREMES, "cosine_with_rest")
        extremes = pd.concat([found.head(EXTREMES), least[::-1]])
    caption = "The prompts that drive the update most"
    caption += (
        "" if extremes is found else f", and the {EXTREMES} whose gradients agree least with the rest or oppose it"
    )
    caption += ", each linked to its token with the largest |w|·(1−π)."
    if (found["share_error"] > 0).any():
        caption += f" Shares have a standard error of at most {percent(found['share_error'].max())} % from sketching."
    shown = ["group", "reward", "responses", "tokens", "gradient_norm", "gradient_share", "cosine_with_rest"]
    table = sheets.table("prompts", extremes, caption, shown, links=True)
    sheets.tables[table.csv] = whole
    return [Paragraph(told), table]


def _directions(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if d.directions is None:
        return []
    blocks: list[Block] = []
    sheets.keep("directions", d.directions)
    if d.movement is not None:
        sheets.keep("moved", d.movement[["interval", "advantage", "delta_prob.all"]])
        blocks.append(
            sheets.figure(
                "movement",
                lambda: plots.plot_movement(d.movement, "all", edges=d.settings.edges),
                "Fig. 1 (c) of the paper on this batch: how far one step moves the tokens of each interval, by the "
                "sign of their advantage; weights are as before afterwards.",
                again=redraw(plots.plot_movement, csv("moved"), edges=d.settings.edges),
            )
        )
    blocks.append(
        sheets.figure(
            "right_directions",
            lambda: plot_diagnosis.plot_right_directions(d.directions, d.labels),
            "Fig. 3 of the paper on this batch: of the tokens of each interval and sign of Â, the share that moves the "
            "right way, in the step predicted to first order and in the one that was taken. One half is chance.",
            again=redraw(plot_diagnosis.plot_right_directions, csv("directions"), repr([*d.labels])),
            bars=OVER_PROMPTS,
        )
    )
    return blocks + _define("right direction", "off-policy")


def _mismatch(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if d.mismatch is None:
        return []
    caption = "|Δ log π| between sampler and trainer by interval of π, and the mean ratio of trainer to sampler."
    means = [number_words(row, 2) for _, row in d.mismatch.iterrows()]
    shown = d.mismatch.assign(mean=means).drop(columns=["value", "lower", "upper"])
    masks = ["masked_share", "removed_share"] if d.mismatch["masked_share"].iat[-1] > 0 else []
    columns = ["label", "num_tokens", "mean", "largest", "ratio", *masks]
    table = sheets.table("mismatch", shown, caption, columns)
    sheets.tables[table.csv] = d.mismatch
    return [table]


def _entropy(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if d.entropy is None:
        return []
    predicted, actual, rank = (
        d.pick(name) for name in ("entropy_change_predicted", "entropy_change_actual", "entropy_proxy_rank")
    )
    told = f"To first order one step changes the mean entropy of {predicted['n']:,} tokens by "
    told += f"{number_words(predicted, 2)} nats"
    if actual is not None:
        of = "" if actual["n"] == predicted["n"] else f" of all {actual['n']:,} tokens"
        told += f"; the real step changed that{of} by {number_words(actual, 2)}"
    told += "."
    if np.isfinite(rank["value"]):
        told += (
            " The covariance of log π and Â, Clip-Cov's proxy for a token's contribution, has a rank correlation of "
            f"{rank['value']:.2f} with the exact contribution."
        )
    caption = (
        "Contributions of the tokens' gradients to the change of the mean entropy, by interval of π and sign of Â; "
        "together with those of momentum and weight decay, they add up to the predicted change."
    )
    draw = lambda: plot_diagnosis.plot_entropy(d.entropy, d.labels)  # noqa: E731
    again = redraw(plot_diagnosis.plot_entropy, csv("entropy"), repr([*d.labels]))
    return [Paragraph(told), sheets.figure("entropy", draw, caption, again=again, bars=OVER_PROMPTS)]


def _influence(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if d.influence is None:
        return []
    blocks = [
        sheets.figure(
            "influence",
            lambda: plots.plot_influence(d.influence, edges=d.settings.edges),
            "Whose gradient moves which interval: share of each column's movement that each source causes, to first "
            "order. Columns add up to 1.",
            again=redraw(plots.plot_influence, csv("influence"), edges=d.settings.edges),
        )
    ]
    if d.against is not None and len(d.against):
        caption = (
            "Tokens predicted to move farthest against their advantage: their change of log π, and the largest "
            "contribution to it in that direction (nats)."
        )
        shown = ["response", "position", "token", "old_prob", "advantage", "predicted", "mover", "mover_change"]
        against = d.against.merge(d.table[[*KEYS, "token"]], on=KEYS, how="left") if "token" in d.table else d.against
        labels = {str(place): label for place, label in enumerate(d.labels)}
        against = against.assign(mover=against["mover"].replace(labels))
        blocks.append(sheets.table("against", _readable(against), caption, shown, links=True))
    return blocks + _define("influence between intervals")


def _drivers(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if d.drivers is None:
        return []
    return [
        sheets.figure(
            "drivers",
            lambda: plots.plot_norm_drivers(d.drivers, parameters=d.parameters),
            "What the norm of a token follows: standardised coefficients of its logarithm on log(1 − π) and entropy, "
            "fitted together, at each place in the network.",
            again=redraw(plots.plot_norm_drivers, csv("drivers"), f"parameters={d.parameters!r}"),
            bars=OVER_PROMPTS,
        )
    ]


def _proxies(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if d.proxies is None:
        return []
    caption = (
        "Proxies for the exact norm ‖g‖ that need no backward pass per token: rank correlation, share of the variance "
        "of log ‖g‖ that each explains, and how many of the 1 % of tokens with the largest norm are among the 1 % "
        "with the largest proxy."
    )
    draw = lambda: plots.plot_proxies(d.proxies, parameters=d.parameters)  # noqa: E731
    again = redraw(plots.plot_proxies, csv("proxies"), f"parameters={d.parameters!r}")
    drawn = sheets.figure("proxies_drawn", draw, caption, again=again, bars=OVER_PROMPTS)
    whole = d.proxies[d.proxies["quantity"].isin([PARAMETERS, ADAMW])]
    table = sheets.table("proxies", whole, "The same in numbers; the file has each layer's activations.", folded=True)
    sheets.tables[table.csv] = d.proxies
    return [drawn, table]


def _weightings(d: Diagnosis, sheets: Sheets) -> list[Block]:
    if (c := d.comparison) is None:
        return []
    caption = (
        "Each token weighting against the baseline, plain GRPO, policy term only: share of the gradient energy by "
        "interval; norm of the summed gradient and its cosine with the baseline's, beside the cosine that the tokens' "
        "energies alone would give; signal to noise of one prompt; share of the tokens "
        "that one step moves in the direction of their advantage, to first order; share of tokens that carry it."
    )
    shown = ["method", "step", "same_as", "norm_ratio", "cosine", "cosine_from_energies", "signal_to_noise"]
    shown += ["right_sgd", "right_adamw", "entropy_change", "effective_share", "zero_share", "gain", "gain_difference"]
    same = "" if not (c.table["same_as"] != "").any() else " Same as: its weights are those of that row."
    draw = lambda: plots.plot_comparison(c.table, c.by_interval, c.labels)  # noqa: E731
    read = [f'{csv(name)}.fillna({{"same_as": ""}})' for name in ("weightings", "weightings_by_interval")]
    again = redraw(plots.plot_comparison, *read, repr([*c.labels]))
    return [
        sheets.figure("weightings_drawn", draw, caption, again=again, bars=OVER_PROMPTS),
        *map(Paragraph, weighting_sentences(c)),
        Paragraph(signal_sentence(c)),
        *(Paragraph(part) for part in gain_sentence(c).split("\n", 1) if part),  # the numbers, then their record
        *(Paragraph(note) for note in c.notes if note.kind != "off-policy"),
        sheets.table("weightings", c.table, f"The same in numbers.{same}", shown, folded=True),
        sheets.table("weightings_by_interval", c.by_interval, "Each weighting by probability interval.", folded=True),
        Paragraph(f"{WHAT_STAYS} {ONE_BATCH}"),
    ]


def _numbers(d: Diagnosis, sheets: Sheets) -> list[Block]:
    caption = "All headline numbers, with the number of tokens behind each."
    sheets.tables[f"{DATA}/statistics.csv"] = d.statistics
    write = {"share": share_words, "bits": bits_words}
    told = [write.get(row["unit"], partial(number_words, significant=3))(row) for _, row in d.statistics.iterrows()]
    shown = {
        "statistic": d.statistics["statistic"].map(label_of),
        "metric": d.statistics["metric"].map(METRICS),
        label_of("interval"): [name_interval(x) if "," in x else x for x in d.statistics["interval"]],
        "value": told,
        "tokens": d.statistics["n"],
        "unit": d.statistics["unit"],
    }
    return [Table(pd.DataFrame(shown), caption, folded=True, csv=f"{DATA}/statistics.csv")]


def _readable(tokens: pd.DataFrame) -> pd.DataFrame:
    """Quote tokens so that blanks and line breaks are visible."""
    return tokens.assign(token=[repr(str(token)) for token in tokens["token"]]) if "token" in tokens else tokens
