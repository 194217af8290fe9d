"""What explains a trainer's gradient T that is no reading's: D = T − G as a sum over few tokens, or sets of tokens.

First one least-squares fit D ≈ Σ x_i G_i over all responses (prompts, micro-batches, processes), by their Gram. Else
orthogonal matching pursuit: ⟨g_t, R⟩ of every token from a jvp along the residual R, the largest ⟨g_t, R⟩²/‖g_t‖², its
vjp, and all refitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.gradients import TokenJacobian, Vectors
from gradscope.updates.auditing.products import FLOAT32, TIGHT
from gradscope.updates.auditing.readings import GUESSED, Reading, Readings, Weights
from gradscope.updates.auditing.search import Search, loss_gradients
from gradscope.updates.auditing.traits import find_trait, ratios
from gradscope.updates.auditing.wording import EQUAL, PARTS, Trait, describe, tell_others

MOST = 32
"""Most tokens, or sets of tokens, in an explanation by steps."""
COMPARED = 8
"""Tokens of which ‖g_t‖ is computed at each step: the largest by ⟨g_t, R⟩²/(1 − π_t)², to which it is about equal."""
PATIENCE, PROGRESS = 8, 0.8
"""From so many steps on, n of them must explain n/MOST of ‖D‖², times PROGRESS: MOST tokens of equal size would."""
UNSURE = 2e-3
"""‖R‖/‖D‖ up to which a Gram of float32 sums does not tell ‖R‖ from 0."""
ZERO = 0.01
"""Largest size of what is dropped again, over that of the largest."""
ENTRIES = 8
"""Entries of a gradient that are needed for each number fitted to it."""


UNTRAINED = ("dropped", "prompts", "before")
"""Kinds of tokens that should have no weight."""


class Fit(NamedTuple):
    """A least-squares fit of D over the parts of a batch."""

    atoms: list[Atom]
    x: Float[np.ndarray, " n"]
    left: float
    """‖R‖."""
    products: Float[np.ndarray, "n n"]
    """Of the parts' gradients."""


class Atom(NamedTuple):
    """A token, or a set of tokens with the reading's weights."""

    kind: str
    """token, response, prompt, pair, micro-batch, process, or a kind of tokens."""
    index: int
    """Of the token among all, or of the part; 0 for a kind."""
    weights: Float[Tensor, " K"]
    """Of its gradient Σ_t weights_t·g_t."""
    of: str = "loss"
    """The part of the loss that its weights are of: loss or policy, which leaves KL out."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """Tokens, or sets of tokens, whose weights are not the reading's."""

    rows: pd.DataFrame
    """A row each: kind (token, response, prompt, pair, micro-batch, process, decay, or a kind of tokens), index, of
    (loss, or policy: without KL), tokens (of a part), times (their weight
    over the reading's; infinite for tokens that it drops), share (of ‖D‖², which sum to at most 1); of micro-batches
    clip_norm (what each was clipped to, if that is why); of pairs reference (whose log π_ref each has, if another's
    explains it); of a token also response, position, token_id, token, sort
    (prompts, dropped, first, last or sampled), prob, weight (w_t), advantage, ratio (π/π_old), and common (what these
    tokens alone have in common, see `traits`)."""
    words: str
    """A sentence."""
    remedy: str | None
    """What to do; None: it does not say."""
    factor: float
    """The trainer's gradient over the reading's at all other tokens."""
    left: float
    """The rest of the trainer's gradient, over its norm."""


class Rest:
    """What a reading leaves of the trainer's gradient: D = T − G."""

    def __init__(self, search: Search, reading: Reading, floor: float) -> None:
        """floor: largest ‖R‖/‖T‖ that rounding explains."""
        self.readings: Readings = search.everywhere
        self.reading = reading
        self.J: TokenJacobian = self.readings.J
        self._multiply = search.multiply_responses
        self.weights: Weights = search.weights[reading]
        self.D = self._rest(search)
        self.norm = sum(float(own.double().square().sum()) for own in search.theirs.values()) ** 0.5
        self.given = {name: part for name, part in self.D.slices.items() if name in search.theirs}
        self.whole = len(self.given) == len(self.D.slices)
        self.floor = floor * self.norm
        self.coarse = floor > TIGHT
        """Whether the floor is half precision's, below which no part can be told from rounding."""
        self.square = float(self.D.products())
        self.along = self._along(self.D)
        self.taken: list[Atom] = []
        self.squares: dict[tuple[str, int], float] = {}
        """‖·‖² of some atoms' gradients, by kind and index."""

    @cached_property
    def vectors(self) -> Vectors:
        """D, and the gradients of what was taken."""
        vectors = Vectors.zeros(self.J.model, MOST + 1, self.J.resources.vectors)
        vectors.rows[0] = self.D.rows[0]
        return vectors

    @cached_property
    def products(self) -> Float[np.ndarray, "n n"]:
        """Inner products of `vectors`."""
        return np.pad([[self.square]], (0, MOST))

    def _rest(self, search: Search) -> Vectors:
        """Return D, 0 in parameters that the trainer's gradient does not have."""
        D = loss_gradients(self.J, self.weights[None])
        D.rows.neg_()
        for name, part in D.slices.items():
            if name in search.theirs:
                D.rows[0, part] += search.theirs[name].to(D.rows)
            else:
                D.rows[0, part] = 0.0
        return D

    def by_parts(self, most: int) -> Explanation | None:
        """Explain it by other weights of at most so many responses, prompts, micro-batches or processes, or by others'
        references; None: not so.

        Costs a gradient per response.
        """
        for fit in self._fits:
            if fit.left > self.floor:
                continue
            clip, others = _clip_norm(fit), self._whose_reference(fit)
            known = clip or others or fit.atoms[0].of != "loss"
            base = 1.0 if known else _common(1 + fit.x)
            away = 1 + fit.x - base
            odd = np.isin(np.arange(len(away)), [*others]) if others else np.abs(away) > EQUAL * abs(base)
            few = others or odd.sum() <= most
            if not few or not odd.any() or self._hidden(np.abs(away[odd]) * np.sqrt(np.diag(fit.products)[odd])):
                continue
            self.taken = [atom for atom, keep in zip(fit.atoms, odd, strict=True) if keep]
            if clip is not None:
                return self._describe(fit.x[odd], fit.left, clip)
            if base != 1:
                self.taken.insert(0, Atom("all", 0, -self.weights[0]))
            found = self._describe(*_fit_alone(fit, odd, base, self.floor))
            if found is None or others is None:
                return found
            words, remedy = tell_others(fit.atoms[0].kind, others, len(fit.x))
            rows = found.rows.assign(reference=found.rows["index"].map(others).astype("Int64"))
            return replace(found, rows=rows, words=words, remedy=remedy)
        return None

    def _whose_reference(self, fit: Fit) -> dict[int, int] | None:
        """Return the pairs, or responses, that have another's log π_ref, and whose, if that makes all their weights;
        None: it does not, or the loss is of no reference."""
        readings, kind = self.readings, fit.atoms[0].kind
        if not readings.compares or f"{kind}s" != readings.loss.weighed.DENOMINATOR or fit.atoms[0].of != "loss":
            return None
        from scipy.optimize import linear_sum_assignment

        part, count = self._parts[kind], len(fit.x)
        chosen = self.J.batch.chosen.long() if kind == "pair" else torch.zeros_like(part)
        rows = torch.zeros(count, 2, dtype=torch.long)
        rows[part, chosen] = torch.arange(len(part))
        of_token, own = part[readings.rows.response], readings.terms.parts[0]
        square = torch.bincount(of_token, own.square(), minlength=count)
        times = []
        for by in range(count):  # each with the reference of the one so many places behind it
            moved = readings.weigh(readings.with_references(rows[(part + by) % count, chosen])).parts[0]
            times.append(torch.bincount(of_token, moved * own, minlength=count) / square)
        places = np.arange(count)
        away = np.abs(torch.stack(times).numpy() - (1 + fit.x))[(places - places[:, None]) % count, places[:, None]]
        fits = away <= FLOAT32 * np.maximum(1, np.abs(1 + fit.x))[:, None]
        _, whose = linear_sum_assignment(np.where(fits, np.where(np.eye(count), 0.0, away), 1.0 + count))
        if not fits[places, whose].all() or (whose == places).all():
            return None
        return {int(own): int(whose[own]) for own in places if whose[own] != own}

    @property
    def even(self) -> bool:
        """Whether parts with about the reading's weights leave nothing, so that there is nothing to explain."""
        return any(fit.left <= self.floor and (np.abs(fit.x) <= EQUAL).all() for fit in self._fits)

    def _hidden(self, sizes: Float[np.ndarray, " n"]) -> bool:
        """Return whether half precision's rounding, of the floor's size, hides one of these parts of D."""
        return self.coarse and bool((sizes <= self.floor).any())

    def _along(self, vectors: Vectors) -> Float[np.ndarray, " K"]:
        return self.J.jvp(vectors).logprob[0].double().numpy()

    @property
    def spread(self) -> int:
        """How many responses' weights a least-squares fit changes: few for the right reading, whatever is left."""
        return next((int((np.abs(f.x) > EQUAL).sum()) for f in self._fits if f.atoms[0].kind == "response"), 0)

    def by_decay(self) -> Explanation | None:
        """Explain it by a multiple of the weights; None: it is not that."""
        with_D = square = 0.0
        for name, part in self.given.items():
            theta = self.J.model.get_parameter(name).detach().flatten().double()
            with_D += float(theta @ self.D.rows[0, part].double())
            square += float(theta @ theta)
        left = max(0.0, self.square - with_D**2 / square) ** 0.5
        if left > self.floor:
            return None
        table = pd.DataFrame([{"kind": "decay", "index": 0, "of": "loss", "times": with_D / square, "share": 1.0}])
        return Explanation(table, *describe(table), 1.0, left / self.norm)

    @cached_property
    def _policy(self) -> Float[Tensor, " K"] | None:
        """The policy's part of the weights; None: it is all, or unknown."""
        terms, sound = self.readings.terms, not self.reading.faults and self.reading.aggregation not in GUESSED
        if not sound or not (terms.parts[1] * terms.mask[1]).any():
            return None
        return self.readings.aggregate(terms.scale(1, 0, 0))[self.reading.aggregation][0]

    @cached_property
    def _fits(self) -> list[Fit]:
        """Least-squares fits over parts of the batch, of the whole loss, then of the policy's part: coarse first."""
        if not self.whole:
            return []
        found = self._fit(-self.weights[0], "loss")
        return found if self._policy is None else [*found, *self._fit(-self._policy, "policy")]

    def _fit(self, weights: Float[Tensor, " K"], of: str) -> list[Fit]:
        rows, found = self.readings.rows, []
        groups, products = self._multiply(weights)
        if of == "loss":
            self.squares |= {("response", row): float(own) for row, own in zip(groups, np.diag(products), strict=True)}
        groups = torch.tensor(groups)
        along = np.bincount(rows.response.numpy(), weights.numpy() * self.along, minlength=len(self.J.batch))
        for kind, part in self._parts.items():
            if not 2 <= len(part.unique()) <= self.D.rows.shape[1] / ENTRIES:
                continue
            into = np.zeros((len(groups), int(part.max()) + 1))
            into[np.arange(len(groups)), part[groups].numpy()] = 1
            K, b = into.T @ products @ into, into.T @ along[groups.numpy()]
            x = np.linalg.lstsq(K, b, rcond=1e-9)[0]
            left = max(0.0, self.square - 2 * b @ x + x @ K @ x) ** 0.5
            of_token = part[rows.response]
            if self.floor < left <= UNSURE * self.square**0.5:
                R = self.J.vjp((weights * torch.from_numpy(x)[of_token])[None].float())
                R.rows.sub_(self.D.rows)
                left = float(R.products()) ** 0.5
            atoms = [Atom(kind, i, torch.where(of_token == i, weights, 0.0), of) for i in range(len(x))]
            found.append(Fit(atoms, x, left, K))
        return found

    @cached_property
    def _parts(self) -> dict[str, Int[Tensor, " B"]]:
        """Each response's part of the batch, by kind."""
        known = {"processes": "process", "micro-batches": "micro-batch"}
        found = {known[name]: own for name, own in self.readings.rows.parts.items()}
        if self.J.batch.pair_ids is not None and self.readings.loss.has_sides:
            found["pair"] = self.J.batch.pair_ids.unique(return_inverse=True)[1]
        found["prompt"] = self.J.batch.group_ids.unique(return_inverse=True)[1]
        return found | {"response": torch.arange(len(self.J.batch))}

    def _sets(self) -> dict[str, Tensor]:
        """Return the kinds of tokens [K], and each response."""
        terms, live = self.readings.terms, self.weights[0] != 0
        found = {"all": live, "first": terms.ends("first"), "last": terms.ends("last")}
        found |= {"positive": self.weights[0] > 0, "negative": self.weights[0] < 0}
        found |= {"dropped": terms.inside & ~terms.kept, "prompts": ~terms.inside}
        found["before"] = self.J.kept(self.readings.positions) == -1
        return {name: own for name, own in found.items() if own.any()}

    def _atoms(self) -> list[Atom]:
        """Return the sets of tokens to choose among, with the weights that they have or, if dropped, would have."""
        terms, response = self.readings.terms, self.readings.rows.response
        would = (terms.parts[:2].sum(0) / int(terms.kept.sum())).where(self.weights[0] == 0, self.weights[0])
        sets = {(name, 0): own for name, own in self._sets().items()}
        live = response[self.weights[0] != 0].unique().tolist()
        sets |= {("response", row): response == row for row in live}
        atoms = (
            Atom(name, index, -torch.where(own, would if name in UNTRAINED else self.weights[0], 0.0))
            for (name, index), own in sets.items()
        )
        return [atom for atom in atoms if atom.weights.any()]

    def by_steps(self, most: int = MOST) -> Explanation | None:
        """Explain it by other weights of at most so many tokens or sets; None: not so.

        A step costs a jvp, and at most COMPARED backward passes through a response.
        """
        if self.D.rows.shape[1] < ENTRIES * MOST or most < 1:
            return None
        atoms = self._atoms()
        if (found := self._steps(atoms, most)) is None or (found.rows["kind"] == "token").sum() in (0, len(found.rows)):
            return found
        # A set may have been taken for the tokens in it: rather these alone, if there are no more of them.
        return self._steps([atom for atom in atoms if atom.kind == "all"], len(found.rows)) or found

    def _steps(self, atoms: list[Atom], most: int) -> Explanation | None:
        self.taken, x, left = [], np.zeros(0), self.square**0.5
        squares = np.array([self._square(atom) for atom in atoms])
        along, begun, since = self.along, self.square, 0
        while left > self.floor and len(self.taken) < most:
            self._take(self._choose(atoms, squares, along))
            x, R, left = self._refit()
            hopeless = left**2 > (1 - PROGRESS * (len(self.taken) - since) / MOST) * begun
            if self.taken[-1].kind == "all":
                begun, since = left**2, len(self.taken)
            elif hopeless and len(self.taken) >= since + PATIENCE:
                return None
            along = self._along(R)
        if left > self.floor or not self.taken:
            return None
        while len(x) > 1:  # sets that were taken for the tokens in them
            size = np.abs(x) * np.sqrt(np.diag(self.products)[1 : len(x) + 1])
            least, kept = int(size.argmin()), [*self.taken]
            if size[least] > max(self.floor, ZERO * size.max()):
                break
            self._drop(least)
            fewer, _, rest = self._refit()
            if rest > self.floor:
                self.taken = kept
                break
            x, left = fewer, rest
        if self._hidden(np.abs(x) * np.sqrt(np.diag(self.products)[1 : len(x) + 1])):
            return None
        return self._describe(x, left)

    def _choose(self, atoms: list[Atom], squares: Float[np.ndarray, " n"], along: Float[np.ndarray, " K"]) -> Atom:
        """Return the set or token that takes most off ‖R‖²."""
        with np.errstate(divide="ignore", invalid="ignore"):
            products = np.array([float(atom.weights.numpy() @ along) for atom in atoms])
            gains = np.where(squares > 0, products**2 / squares, 0.0)
            away = np.exp(self.J.kept(self.J.statistics.log_one_minus_prob).double().numpy())
            scores = np.where(away > 0, (along / np.maximum(away, 1e-3 * away.max())) ** 2, 0.0)
        taken = {(atom.kind, atom.index) for atom in self.taken}
        gains[[place for place, atom in enumerate(atoms) if (atom.kind, atom.index) in taken]] = 0.0
        scores[[atom.index for atom in self.taken if atom.kind == "token"]] = 0.0
        best = None
        for token in np.argsort(-scores)[:COMPARED].tolist():
            square = self._square(self._token(token))
            gain = along[token] ** 2 / square if square else 0.0
            if scores[token] and (best is None or gain > best[1]):
                best = self._token(token), gain
        if best is None or gains.max(initial=0.0) > best[1] * (1 + 1e-6):
            return atoms[int(gains.argmax())]
        return best[0]

    def _token(self, token: int) -> Atom:
        one = torch.zeros(self.J.num_tokens, dtype=torch.float64)
        one[token] = 1.0
        return Atom("token", token, one)

    def _square(self, atom: Atom) -> float:
        key = atom.kind, atom.index
        if key not in self.squares:
            self.squares[key] = float(self._gradient(atom).double().square().sum())
        return self.squares[key]

    def _gradient(self, atom: Atom) -> Float[Tensor, " P"]:
        """Return Σ_t weights_t·g_t, by a pass through the responses that have weights."""
        response = self.readings.rows.response
        rows = response[atom.weights != 0].unique()
        weights = atom.weights[torch.isin(response, rows)]
        return self._cut(self.J.select(rows).vjp(weights[None].float())).rows[0]

    def _cut(self, vectors: Vectors) -> Vectors:
        """Set entries of parameters to 0 that the trainer's gradient does not have."""
        if not self.whole:
            kept = vectors.rows.clone()
            vectors.rows.zero_()
            for part in self.given.values():
                vectors.rows[:, part] = kept[:, part]
        return vectors

    def _take(self, atom: Atom) -> None:
        """Add to what explains D, and to the inner products."""
        self.taken.append(atom)
        vector = self._gradient(atom)
        last = len(self.taken)
        self.vectors.rows[last] = vector
        pairs = ((self.vectors.rows[: last + 1, s].double(), vector[s].double()) for s, _ in self.vectors.spans())
        own = sum(rows @ part.to(rows) for rows, part in pairs)
        self.products[last, : last + 1] = self.products[: last + 1, last] = own.cpu().numpy()

    def _drop(self, place: int) -> None:
        """Take one away again."""
        kept = [0, *(row + 1 for row in range(len(self.taken)) if row != place)]
        self.taken.pop(place)
        self.vectors.rows[: len(kept)] = self.vectors.rows[kept]
        self.products[: len(kept), : len(kept)] = self.products[np.ix_(kept, kept)]

    def _refit(self) -> tuple[np.ndarray, Vectors, float]:
        """Return the coefficients of what was taken, the residual and its norm."""
        last = len(self.taken) + 1
        x = np.linalg.lstsq(self.products[1:last, 1:last], self.products[1:last, 0], rcond=1e-10)[0]
        R = Vectors(self.vectors.rows[:1].clone(), self.vectors.slices)
        for factor, row in zip(x, self.vectors.rows[1:last], strict=True):
            R.rows[0].sub_(row, alpha=float(factor))
        return x, R, float(R.products()) ** 0.5

    def _describe(self, x: np.ndarray, left: float, clip: tuple[str, float] | None = None) -> Explanation | None:
        """Make rows of what was taken; clip: how micro-batches were clipped, and to what norm. None: all weights are
        about equal."""
        batch, terms = self.J.batch, self.readings.terms
        policy = self.J.policy
        places, numbers = batch.response_mask.nonzero(), self.weights[0].numpy()
        positions = self.J.kept(self.readings.positions)
        prob = self.J.kept(self.J.statistics.logprob).double().exp().numpy()
        base = next((1 + own for atom, own in zip(self.taken, x, strict=True) if atom.kind == "all"), 1.0)
        # What each token's weight is, by its sets and itself together.
        theirs = numbers - sum(own * atom.weights.numpy() for atom, own in zip(self.taken, x, strict=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where(numbers != 0, theirs / numbers, np.inf)
        alone = np.zeros(len(numbers), dtype=bool)
        alone[[atom.index for atom in self.taken if atom.kind == "token"]] = True
        sorts, ratio, trait = self._sets(), ratios(self.readings), self._trait(alone)
        rows = []
        for atom, own in zip(self.taken, x, strict=True):
            row = {"kind": atom.kind, "index": atom.index, "of": atom.of}
            row["times"] = base + own * (atom.kind != "all") if atom.kind not in UNTRAINED else np.inf
            if atom.kind not in UNTRAINED and atom.of == "loss" and atom.kind != "all":
                rest = (atom.weights.numpy() != 0) & ~alone
                row["times"] = float(np.median(times[rest])) if rest.any() else row["times"]
            row["share"] = own * float(atom.weights.numpy() @ self.along) / self.square
            if atom.kind in self._parts:
                inside = self._parts[atom.kind][self.readings.rows.response] == atom.index
                row["tokens"] = int((inside & terms.kept).sum())
            if clip is not None:
                row["clip_norm"] = clip[1]
            if atom.kind == "token":
                token, place = atom.index, places[atom.index].tolist()
                exact = numbers[token]
                row["times"] = float(times[token])
                part = 0.0 if self._policy is None else float(self._policy[token])
                rest = abs(theirs[token] - base * (exact - part))  # what is left is KL, or nothing
                if part and rest <= EQUAL * abs(part) and rest < abs(theirs[token]):
                    row |= {"of": "policy", "times": 0.0}
                identity = int(batch.input_ids[place[0], place[1]])
                row |= {"response": place[0], "position": int(positions[token]), "token_id": identity}
                text = "" if policy is None or policy.tokenizer is None else policy.decode([identity])
                row["token"] = text or f"id {identity}"
                row["sort"] = next(
                    (name for name in ("prompts", "dropped", "first", "last") if name in sorts and sorts[name][token]),
                    "sampled",
                )
                row |= {"prob": prob[token], "weight": exact * int(terms.kept.sum())}
                row["advantage"] = float(terms.advantages[token])
                row |= {} if ratio is None else {"ratio": float(ratio[token])}
                row |= {} if trait is None else {"common": trait.name}
            rows.append(row)
        table = pd.DataFrame(rows).sort_values("share", ascending=False, kind="stable", ignore_index=True)
        if (np.abs(np.append(table["times"] / base, base) - 1) <= EQUAL).all():
            return None
        whole = [name for name in ("response", "position", "token_id", "tokens") if name in table]
        table[whole] = table[whole].astype("Int64")
        words, remedy = describe(table, base, trait, clip)
        return Explanation(table, words + self._recount(table, base), remedy, base, left / self.norm)

    def _recount(self, table: pd.DataFrame, base: float) -> str:
        """Say how denominators count parts of other weights, if that explains the weight of all others."""
        rows = self.readings.rows.response[self.readings.terms.kept]
        counted = {"token-mean": ("tokens", rows), "sequence-mean": ("responses", rows.unique())}
        name, rows = counted.get(self.reading.aggregation, ("", rows))
        sets = table[table["kind"].isin(PARTS)]
        pairs = zip(sets["kind"], sets["index"], strict=True)
        sizes = np.array([int((self._parts[kind][rows] == index).sum()) for kind, index in pairs])
        count = len(rows) + float((sets["times"] / base - 1) @ sizes)
        if base == 1 or not name or len(sets) + 1 < len(table) or abs(base * count / len(rows) - 1) > FLOAT32:
            return ""
        return f", also in the denominator ({count:.0f} {name} rather than {len(rows)})"

    def _trait(self, alone: Float[np.ndarray, " K"]) -> Trait | None:
        """Return what the tokens that were taken one by one have in common: among those of the loss, of its policy's
        part if any has that, or else among those that it drops."""
        chosen, terms = torch.from_numpy(alone), self.readings.terms
        policy = terms.parts[0] * terms.mask[0] != 0
        for among in (policy, self.weights[0] != 0, self.weights[0] == 0):
            if chosen.any() and not (chosen & ~among).any():
                return find_trait(self.readings, chosen, among, self._parts)
        return None


def _common(times: Float[np.ndarray, " n"]) -> float:
    """Return the weight, over the right one, that most parts have; 1 if then no fewer numbers are left to explain."""
    near = np.abs(times[:, None] - times) <= EQUAL * np.abs(times[:, None])
    most = near[near.sum(1).argmax()]
    fewer = 1 + (~most).sum() < (np.abs(times - 1) > EQUAL).sum() and 2 * most.sum() > len(times)
    return float(np.median(times[most])) if fewer and np.abs(times[most]).min() > EQUAL else 1.0


def _fit_alone(
    fit: Fit, odd: Bool[np.ndarray, " n"], base: float, floor: float
) -> tuple[Float[np.ndarray, " m"], float]:
    """Return the coefficients of these parts alone, behind that of all parts unless base is 1, and ‖R‖; of the fit of
    all parts if that is above the floor."""
    K, into = fit.products, np.eye(len(odd))[:, odd]
    some = (fit.x - (base - 1))[odd]
    if base != 1:
        into, some = np.column_stack([np.ones(len(odd)), into]), np.append(base - 1, some)
    alone = np.linalg.lstsq(into.T @ K @ into, into.T @ K @ fit.x, rcond=1e-9)[0]
    # The rest of the fit of all parts is orthogonal to each of them.
    rests = [fit.x - into @ own for own in (alone, some)]
    lefts = [(fit.left**2 + rest @ K @ rest) ** 0.5 for rest in rests]
    return (alone, lefts[0]) if lefts[0] <= floor else (some, lefts[1])


def _clip_norm(fit: Fit) -> tuple[str, float] | None:
    """Return how the gradient was clipped inside the loop over micro-batches, and to what norm; None: it was not.

    "each": a micro-batch's gradient before it was added, so that x_i‖G_i‖ is the norm of all that were clipped. "sum":
    the sum S_i = c_i·(S_{i−1} + G_i) after each, so that x_i = c_i·…·c_n. Two that were clipped must agree.
    """
    if fit.atoms[0].kind != "micro-batch":
        return None
    times, steps = 1 + fit.x, np.arange(len(fit.x))
    if (times <= 0).any():
        return None
    own = times * np.sqrt(np.diag(fit.products))
    part = np.where(steps[:, None] >= steps, times, 0.0)  # of S_i, times the later factors
    later = np.append(times[1:], 1.0)
    sums = np.sqrt(np.einsum("ij,jk,ik->i", part, fit.products, part)) / later
    for how, factors, norms in (("each", times, own), ("sum", times / later, sums)):
        cut = factors < 1 - FLOAT32
        if cut.sum() < 2 or (factors[~cut] > 1 + FLOAT32).any():
            continue
        norm = float(np.median(norms[cut]))
        if (np.abs(norms[cut] / norm - 1) <= FLOAT32).all() and (norms[~cut] <= norm * (1 + FLOAT32)).all():
            return how, norm
    return None
