"""What the engine does beside its products, counted: constants of gradients.cost.measuring that are said to be.
be.

    python -m analyses.benchmarks.work_counts

A dispatch mode adds up what every elementwise operation reads and writes, and counts operations, while small policies
of many shapes are measured; least squares then finds how many arrays of each width, and how many operations, a block,
a chunk and a token come to. No time is measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gradscope.gradients import SequenceTokens, TokenGradientMeter, measuring
from gradscope.gradients.cost.training import FORWARD_GATES, FORWARD_STREAMS
from gradscope.gradients.engine.chunks import neighbours
from gradscope.gradients.engine.decoder.rules import NARROWEST_QUERIES
from gradscope.gradients.engine.norms import strip_width
from gradscope.gradients.engine.stack import Stack
from gradscope.policy import Policy, find_blocks

VIEWS = ("view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze")
VIEWS += ("alias", "detach", "as_strided", "split", "split_with_sizes", "unbind", "_reshape_alias", "lift_fresh")
SHAPES = (
    # hidden, MLP, heads, layers, tokens, rows of a chunk
    (64, 128, 2, 3, 48, 1536),
    (64, 128, 2, 5, 48, 1536),
    (128, 128, 2, 3, 48, 1536),
    (64, 512, 2, 3, 48, 1536),
    (64, 128, 8, 3, 48, 1536),
    (64, 128, 2, 3, 96, 1536),
    (64, 128, 4, 3, 128, 700),
    (128, 384, 4, 4, 64, 1536),
    (256, 512, 4, 3, 96, 1000),
)
FORWARD_SCORES = 5
"""Arrays of scores that a forward pass of eager attention reads and writes."""


class Counted(TorchDispatchMode):
    """FLOPs of products, numbers that other operations read and write, and operations by name; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.numbers, self.operations = 0, 0, Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = function(*args, **(kwargs or {})), function._schema.name.removeprefix("aten::")
        if name in VIEWS:
            return out
        self.operations[name] += 1
        if formula := product_formula(function):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        else:
            self.numbers += sum(_distinct(t) for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        return out


def product_formula(function: Any) -> Any:
    """FLOPs of a matrix product, by torch's formulas, which know none that adds in place; None of anything else."""
    in_place = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
    packet = function._overloadpacket
    return flop_registry.get(in_place.get(packet, packet))


def _distinct(tensor: Tensor) -> int:
    """Numbers in memory: an axis that is only repeated counts once."""
    return int(np.prod([size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]))


def count(rules: bool) -> tuple[dict[str, float], dict[str, float]]:
    """(arrays by width, operations by what they are for), as the engine's constants have them."""
    widths, numbers, kinds, operations = [], [], [], []
    for hidden, mlp, heads, layers, length, rows in SHAPES:
        policy = _policy(hidden, mlp, heads, layers)
        ids, targets = torch.arange(length) % 32, torch.arange(length // 4, length)
        with measuring(policy.model):
            meter = TokenGradientMeter(policy, ids, rows=rows, rules=rules)
            everything = torch.arange(len(targets))
            with Counted() as counted:
                meter.measure(ids, targets, everything, temperature=1.0)
            with Counted() as settled:  # what the rules' activations take is count_settling's
                if rules:
                    meter._start(Stack.of([SequenceTokens(ids, targets, everything)]))
            limits = meter._limits(meter.decoder or meter.graph)
            chunks = [(run.width, run.length) for run in neighbours([targets.tolist()], limits)]
        passes = [int(targets[-1]), *(n for _, n in chunks)]  # along the graph
        forward = sum(n * (FORWARD_STREAMS * hidden + FORWARD_GATES * mlp + FORWARD_SCORES * heads * n) for n in passes)
        cells = sum(k * n for k, n in chunks)
        scores = sum(k * n * ((n + strip_width(n, NARROWEST_QUERIES)) / 2 if rules else n) for k, n in chunks)
        dense = layers - rules
        widths.append([dense * cells * hidden, dense * cells * mlp, dense * scores * heads])
        numbers.append(counted.numbers - (settled.numbers if rules else layers * forward))
        # The rules do nothing token by token: a column of zeros has no part in the fit.
        kinds.append([layers * len(chunks), 0 if rules else layers * len(targets), layers, 1])
        operations.append(counted.operations.total())
    found = zip(("streams", "gates", "scores"), _fit(widths, numbers), strict=True)
    names = ("operations", "token_operations", "of a response's block", "of a response")
    return dict(found), dict(zip(names, _fit(kinds, operations), strict=True))


def count_settling() -> dict[str, float]:
    """What making the rules' activations of a forward pass, and the head's way back, add to it: arrays by width at each
    position, operations of a block and of the pass."""
    widths, numbers, kinds, operations = [], [], [], []
    for hidden, mlp, heads, layers, length, _ in SHAPES:
        policy = _policy(hidden, mlp, heads, layers)
        ids, targets = torch.arange(length) % 32, torch.arange(length // 4, length)
        with measuring(policy.model):
            meter = TokenGradientMeter(policy, ids)
            stack = Stack.of([SequenceTokens(ids, targets, torch.arange(len(targets)))])
            with Counted() as forward, torch.no_grad():
                policy.model(input_ids=stack.ids, use_cache=False)
            with Counted() as both:
                meter._start(stack)
        n = stack.ids.shape[1]
        widths.append([layers * n * hidden, layers * n * mlp, layers * heads * n**2])
        numbers.append(both.numbers - forward.numbers)
        kinds.append([layers, 1])
        operations.append(both.operations.total() - forward.operations.total())
    found = zip(("streams", "gates", "scores"), _fit(widths, numbers), strict=True)
    return dict(found) | dict(zip(("operations", "of a pass"), _fit(kinds, operations), strict=True))


def count_logits() -> dict[str, float]:
    """Arrays of logits that passes over a response read and write: for its statistics, and to measure its tokens."""
    numbers, vocabularies, targets = defaultdict(list), (2048, 8192), torch.arange(12, 48)
    for vocab in vocabularies:
        policy, ids = _policy(64, 128, 2, 2, vocab), torch.arange(48)
        with measuring(policy.model):
            meter = TokenGradientMeter(policy, ids)
            with Counted() as counted:
                meter.measure_cheaply(ids, targets, temperature=1.0)
            numbers["statistics"].append(counted.numbers)
            with Counted() as counted:
                meter.measure(ids, targets, torch.arange(len(targets)), temperature=1.0)
            numbers["measured"].append(counted.numbers)
    each = len(targets) * (vocabularies[1] - vocabularies[0])
    return {name: (large - small) / each for name, (small, large) in numbers.items()}


def _policy(hidden: int, mlp: int, heads: int, layers: int, vocab: int = 32) -> Policy:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        num_hidden_layers=layers,
        vocab_size=vocab,
        tie_word_embeddings=True,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    return Policy(model, None, find_blocks(model))


def _fit(features: list[list[float]], counts: list[float]) -> list[float]:
    """Least squares of relative errors."""
    a, y = np.array(features, float), np.array(counts, float)
    return np.linalg.lstsq(a / y[:, None], np.ones(len(y)), rcond=None)[0].tolist()


def main() -> None:
    for name, rules in (("RULES", True), ("GRAPH", False)):
        for found in count(rules):
            print(name, {key: round(value, 1) for key, value in found.items()})
    print("settling", {key: round(value, 1) for key, value in count_settling().items()})
    print("logits", {key: round(value, 1) for key, value in count_logits().items()})


if __name__ == "__main__":
    main()
