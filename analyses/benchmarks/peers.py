"""Every way to exact norms of token gradients: autograd's loops, torch.func, other packages as their authors document
them, and gradscope.

`token_gradients` runs each way in a process of its own, with the Python of the environment that has its package:

    python -m analyses.benchmarks.peers NAME

takes commands and gives answers as pickles, so nothing but torch, transformers and that package is needed. Sequences
are measured one by one, in blocks of consecutive tokens; a pass takes what comes before the block's last token, and
logits at its tokens only. For a package that knows samples rather than tokens, each token of a block is one: a copy of
the sequence with the loss of this token.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import importlib.metadata
import logging
import pickle
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

Norms = Callable[[Tensor, Tensor], Tensor]
"""(sequence [T], indices of tokens in it [m]) → norms [m]; gradscope takes several sequences [B, T] → [B · m]."""
AT_LEAST = 0.5
"""CPU seconds over which a measurement is repeated."""
LAST = 8
"""Tokens, the last of each sequence, whose norms' peak memory is taken: it grows with the prefix."""


def is_counted(module: nn.Module, linear: bool) -> bool:
    return isinstance(module, nn.Linear) or not linear


def freeze_rest(model: nn.Module, linear: bool) -> dict[str, nn.Parameter]:
    """Freeze what does not count, and return the rest by name."""
    model.requires_grad_(False)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(is_counted(module, linear))
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def freeze_all_but_embedding(model: nn.Module) -> None:
    """Leave autograd a graph, but no weight's gradient to compute: bergson and dattri-llm form it from their hooks."""
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)


def logprobs(model: Callable, ids: Tensor, targets: Tensor) -> Tensor:
    """Return log π of the tokens from one pass over the sequence, [m]."""
    logits = model(input_ids=ids[None, : targets[-1]], use_cache=False, logits_to_keep=targets - 1).logits[0]
    return logits.log_softmax(-1)[torch.arange(len(targets)), ids[targets]]


def sum_over_copies(model: Callable, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the tokens' log π, each from a copy of the sequence of its own."""
    each, width = torch.arange(len(targets)), int(targets[-1] - targets[0]) + 1
    copies = ids[: targets[-1]].repeat(len(targets), 1)
    logits = model(input_ids=copies, use_cache=False, logits_to_keep=width).logits
    return logits[each, targets - targets[0]].log_softmax(-1)[each, ids[targets]].sum()


def loop(model: nn.Module, linear: bool) -> Norms:
    """Take one backward pass a token along the graph of its block."""
    parameters = list(freeze_rest(model, linear).values())

    def norms(ids: Tensor, targets: Tensor) -> Tensor:
        squares = []
        for logprob in logprobs(model, ids, targets):
            gradients = torch.autograd.grad(logprob, parameters, retain_graph=True)
            squares.append(sum(g.square().sum() for g in gradients))
        return torch.stack(squares).sqrt()

    return norms


def vmap(model: nn.Module, linear: bool) -> Norms:
    """Map a block's pullback over its tokens, as torch.func.jacrev does; a forward pass serves them all."""
    model.set_attn_implementation("eager")  # the fused kernel's backward pass cannot be mapped
    counted = {name: p.detach() for name, p in freeze_rest(model, linear).items()}

    def norms(ids: Tensor, targets: Tensor) -> Tensor:
        def forward(values: dict[str, Tensor]) -> Tensor:
            return logprobs(lambda **given: torch.func.functional_call(model, values, (), given), ids, targets)

        _, pull = torch.func.vjp(forward, counted)
        squares = torch.vmap(lambda seed: sum(g.square().sum() for g in pull(seed)[0].values()))
        return squares(torch.eye(len(targets))).sqrt()

    return norms


def torchjd(model: nn.Module, linear: bool) -> Norms:
    """Take the diagonal of the Gramian of a block's log π; with batch_dim, a sequence would be a sample."""
    from torchjd.autogram import Engine

    model.set_attn_implementation("eager")  # as for vmap, which the engine uses
    freeze_rest(model, linear)
    engine = Engine(*(m for m in model.modules() if isinstance(m, nn.Linear)) if linear else [model], batch_dim=None)
    return lambda ids, targets: engine.compute_gramian(logprobs(model, ids, targets)).diagonal().sqrt()


def opacus(model: nn.Module, linear: bool) -> Norms:
    """Read the norms of ghost clipping; a sampler is registered for RMSNorm, for which it would take torch.func."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping, register_grad_sampler

    @register_grad_sampler([type(m) for m in model.modules() if hasattr(m, "variance_epsilon")])
    def sample(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        unit = nn.functional.rms_norm(activations[0], layer.weight.shape, eps=layer.variance_epsilon)
        return {layer.weight: (unit * backprops).flatten(1, -2).sum(1)}

    logging.getLogger("opacus").setLevel(logging.ERROR)
    freeze_rest(model, linear)
    model.train()  # Its hooks ignore a model in eval mode; these have no dropout.
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", use_ghost_clipping=True, strict=False)

    def norms(ids: Tensor, targets: Tensor) -> Tensor:
        sum_over_copies(wrapped, ids, targets).backward()
        found = wrapped.get_norm_sample()
        wrapped.zero_grad(set_to_none=True)
        return found

    return norms


def bergson(model: nn.Module, linear: bool) -> Norms:
    """Subclass its collector to consume each module's gradients within the backward pass (docs/gradient-collection)."""
    from bergson import GradientProcessor
    from bergson.collector.collector import HookCollectorBase

    class Squares(HookCollectorBase):
        def setup(self) -> None:
            self.squares = 0.0

        def backward_hook(self, module: nn.Module, g: Tensor) -> None:
            self.squares = self.squares + self._compute_gradient(module, g).square().sum(1)

        def process_batch(self, indices: list[int], **given: object) -> None:
            pass

        def teardown(self) -> None:
            pass

    freeze_all_but_embedding(model)
    collector = Squares(model=model, processor=GradientProcessor(include_bias=True))
    owners = {name for name, m in model.named_modules() if is_counted(m, linear) and [*m.parameters(recurse=False)]}
    if left := owners - set(collector.target_info):
        kinds = {type(model.get_submodule(name)).__name__ for name in left}
        raise NotImplementedError(f"its collectors take no gradients of {' and '.join(sorted(kinds))}")

    def norms(ids: Tensor, targets: Tensor) -> Tensor:
        collector.squares = 0.0
        with collector.with_batch():
            sum_over_copies(model, ids, targets).backward()
        model.zero_grad()
        return collector.squares.sqrt()

    return norms


def dattri_llm(model: nn.Module, linear: bool) -> Norms:
    """Sum its squared norms of the layers' factors at a step's end; RMSNorm is declared as its README says."""
    from dattri_llm import HookManager, HookManagerConfig
    from dattri_llm.gradient import HookManagerCallback, ops
    from dattri_llm.utils.module import rms_norm_module_kwargs

    class Squares(HookManagerCallback):
        def on_step_end(self, record: object) -> None:
            data, kinds = record.gradient.data, record.gradient.layer_types
            self.squares = sum(ops.grad_norm_sq(layer, kinds[name]) for name, layer in data.items())

    freeze_all_but_embedding(model)
    hooked = {name: m for name, m in model.named_modules() if is_counted(m, linear) and [*m.parameters(recurse=False)]}
    own = {name: m for name, m in hooked.items() if hasattr(m, "variance_epsilon")}
    shapes = {name: {"normalized_shape": len(m.weight), "eps": m.variance_epsilon} for name, m in own.items()}
    config = HookManagerConfig(
        hook_types=dict.fromkeys(hooked, "linear_io"),
        layer_types=dict.fromkeys(own, "nn.RMSNorm"),
        module_kwargs={name: rms_norm_module_kwargs(**given) for name, given in shapes.items()},
        include_frozen=True,
    )
    callback = Squares()
    manager = HookManager(model, config=config, callbacks=[callback])

    def norms(ids: Tensor, targets: Tensor) -> Tensor:
        with manager.collect():
            sum_over_copies(model, ids, targets).backward()
        model.zero_grad()
        return callback.squares.sqrt()

    return norms


def gradscope(model: nn.Module, linear: bool, *, rules: bool = True) -> Norms:
    """Measure by backward rules; every module's norm and every layer's activation gradient come along."""
    from gradscope.gradients import SequenceTokens, TokenGradientMeter, measuring
    from gradscope.policy import Policy, find_blocks

    with measuring(model):
        meter = TokenGradientMeter(Policy(model, None, find_blocks(model)), torch.arange(64), rules=rules)
    counted = [name for name in meter.module_names if is_counted(model.get_submodule(name), linear)]

    def norms(ids: Tensor, targets: Tensor) -> Tensor:
        sequences, found = [SequenceTokens(row, targets, torch.arange(len(targets))) for row in ids], {}
        with measuring(model):
            for group in meter.group(sequences):
                found |= zip(group, meter.measure_together([sequences[i] for i in group]), strict=True)
        each = [found[i].module_grad_norm for i in range(len(ids))]
        return torch.cat([torch.stack([own[name] for name in counted]).norm(dim=0) for own in each])

    return norms


def graph(model: nn.Module, linear: bool) -> Norms:
    """Measure with gradscope along the model's own graph, as it measures any architecture."""
    return gradscope(model, linear, rules=False)


PACKAGES = {"opacus": "opacus", "torchjd": "torchjd", "bergson": "bergson", "dattri-llm": "dattri-llm"}
"""The package of each peer."""
WAYS = {
    "loop": loop, "vmap": vmap, "torchjd": torchjd, "opacus": opacus, "bergson": bergson, "dattri-llm": dattri_llm,
    "graph": graph, "gradscope": gradscope,
}  # fmt: skip
OWN = ("graph", "gradscope")
"""Ways that take several sequences and cut them themselves."""


def measure(norms: Norms, name: str, block: int, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the norms of these tokens of each sequence, [B · m]."""
    if name in OWN:
        return norms(ids, targets)
    return torch.cat([norms(row, part) for row in ids for part in targets.split(block)])


class Way:
    """A way in its process: what it is asked and what it answers."""

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, checkpoint: str, linear: bool, block: int) -> float:
        """Load a policy and prepare the way for it; return the CPU seconds of the latter."""
        from transformers import AutoModelForCausalLM

        self.norms = None  # frees the policy before
        model, self.block = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval(), block
        start = time.process_time()
        self.norms = WAYS[self.name](model, linear)
        return time.process_time() - start

    def time(self, ids: list[list[int]], targets: list[int]) -> tuple[float, float, list[float]]:
        """Return CPU and wall seconds of a measurement, and its norms."""
        ids, targets, calls = torch.tensor(ids), torch.tensor(targets), 0
        wall, cpu = time.perf_counter(), time.process_time()
        while not calls or time.process_time() - cpu < AT_LEAST:
            found, calls = measure(self.norms, self.name, self.block, ids, targets), calls + 1
        return (time.process_time() - cpu) / calls, (time.perf_counter() - wall) / calls, found.tolist()

    def peak(self, ids: list[list[int]], targets: list[int]) -> int:
        """Return the most bytes that it allocates beside the policy."""
        last = torch.tensor(targets[-LAST:])
        return allocated_peak(lambda: measure(self.norms, self.name, self.block, torch.tensor(ids), last))

    def version(self) -> str | None:
        """Return the version of the way's package, or of torch; None where it is not installed."""
        try:
            return importlib.metadata.version(PACKAGES.get(self.name, "torch"))
        except importlib.metadata.PackageNotFoundError:
            return None


def allocated_peak(call: Callable[[], object]) -> int:
    """Return the peak bytes that the call allocates on the CPU, above those allocated before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    records = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for record in sorted(records, key=lambda e: e.start_ns()):
        held += record.nbytes()
        peak = max(peak, held)
    return peak


def serve(name: str) -> None:
    """Answer commands (method, arguments) from standard input until it ends: (result, None) or (None, complaint)."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # The packages and torch.func warn about their own internals.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a package prints is no answer
    way = Way(name)
    while True:
        try:
            method, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = getattr(way, method)(*arguments), None
        except Exception as error:
            answer = None, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
