"""What a training run would take: memory of each process by moment, work and seconds of a step, disk; no weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gradscope.errors import InputError
from gradscope.gradients import ModelShape, Rates, describe_seconds, gpu_rates
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.memory import GIB, checkpoint_bytes, step_memory, weights_bytes
from gradscope.trainer.pilot import try_step
from gradscope.trainer.work import (
    Lengths,
    Number,
    decoded_together,
    kv_bytes,
    optimizer_steps,
    step_work,
    trained_parameters,
)

NO_FLOPS = ("compacting the cache", "optimizer")
"""Parts of `step_work` in bytes and in parameters."""


def step_rates(config: TrainConfig, shape: ModelShape, lengths: Lengths, machine: str | None = None) -> Rates:
    """Rates of `step_work`'s parts on a GPU of `machine.GPUS`; None: on this machine, tried for some seconds."""
    if machine is None:
        return try_step(config, lengths)
    parts = dict.fromkeys(step_work(config, shape, lengths, passes=1))
    return gpu_rates(machine, config.precision, parts | {"sampling": decoded_together(config, lengths)})


USABLE = 0.9
"""Share of a GPU's memory that a plan counts on: the rest goes to the driver, to kernels and to fragmentation."""


@dataclass(frozen=True)
class Plan:
    """What `plan_training` found; printed, a table with its assumptions."""

    config: TrainConfig
    shape: ModelShape
    num_processes: int
    sharded: bool
    device_memory: Number
    """GiB of one process's GPU."""
    lengths: Lengths
    memory: Mapping[str, Mapping[str, Number]]
    """Bytes of one process: moment → part → bytes, at most."""
    tokens_at_most: int
    """Tokens of a step with prompts and responses of full length."""
    tokens_expected: int
    """Tokens of a step with responses of the assumed mean length."""
    optimizer_steps: int
    """Optimizer steps on one batch of responses."""
    steps: int | None
    """Batches of the whole run; None: it depends on how many questions the data hold."""
    checkpoint_bytes: Number
    """On disk."""
    rates: Rates | None = None
    """Of the machine that seconds are expected on; None: no seconds."""

    @property
    def peak(self) -> Number:
        """Bytes of one process at the moment that takes most."""
        return max(sum(parts.values()) for parts in self.memory.values())

    @property
    def work(self) -> dict[str, Number]:
        """`step_work` of one step in one process, with responses of the assumed mean length."""
        return step_work(self.config, self.shape, self.lengths, self.passes)

    @property
    def flops(self) -> dict[str, Number]:
        """FLOPs of that work."""
        return {name: part for name, part in self.work.items() if name not in NO_FLOPS}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the same work; empty without rates."""
        return {} if self.rates is None else self.rates.seconds(self.work)

    @property
    def passes(self) -> int:
        """Over each mini-batch."""
        return 1 if self.config.passes.lopti_eta is None else 2

    @property
    def fits(self) -> bool:
        """Whether the peak is within USABLE of the GPU, and vLLM's share holds its weights and one response."""
        return self.peak <= USABLE * self.device_memory * GIB and self.vllm_responses >= 1

    @property
    def vllm_responses(self) -> Number:
        """Responses of full length whose keys and values vLLM's share holds at a time; infinite without vLLM."""
        if self.config.engine != "vllm":
            return math.inf
        room = self.config.vllm_memory * self.device_memory * GIB - weights_bytes(self.config, self.shape)
        return room // (kv_bytes(self.shape, self.config.precision) * (self.lengths.prompt + self.lengths.longest))

    def changed(self, num_processes: int, sharded: bool, *, micro_batch_size: int | None = None) -> Plan:
        """The same run, launched otherwise."""
        config = self.config if micro_batch_size is None else replace(self.config, micro_batch_size=micro_batch_size)
        return replace(
            self,
            config=config,
            num_processes=num_processes,
            sharded=sharded,
            memory=step_memory(config, self.shape, self.lengths, num_processes, sharded, self.device_memory),
        )

    def __str__(self) -> str:
        return "\n".join((*_describe_run(self), "", *_describe_memory(self), "", *_describe_step(self)))


def plan_training(
    config: TrainConfig,
    shape: ModelShape,
    *,
    num_processes: int = 1,
    sharded: bool = False,
    device_memory: Number = 80,
    prompt_tokens: int | None = None,
    mean_response: int | None = None,
    questions: int | None = None,
    rates: Rates | None = None,
) -> Plan:
    """What a step of this configuration takes with a network of this shape.

    sharded: the processes share weights, gradients and optimizer (FSDP); else each has them whole (DDP).
    device_memory: GiB of each process's GPU.
    prompt_tokens: of the longest prompt; default an eighth of max_new_tokens. mean_response: default a quarter of it.
    questions: how many the data hold, for the length of a run that is given in epochs.
    rates: of the machine that seconds are wanted for; None: no seconds.
    Raises InputError where prompts leave no room in the context.
    """
    lengths = find_lengths(config, shape, prompt_tokens, mean_response)
    passes = 1 if config.passes.lopti_eta is None else 2
    return Plan(
        config=config,
        shape=shape,
        num_processes=num_processes,
        sharded=sharded,
        device_memory=device_memory,
        lengths=lengths,
        memory=step_memory(config, shape, lengths, num_processes, sharded, device_memory),
        tokens_at_most=config.num_responses * (lengths.prompt + lengths.longest),
        tokens_expected=config.num_responses * (lengths.prompt + lengths.mean),
        optimizer_steps=optimizer_steps(config, passes),
        steps=_steps(config, questions),
        checkpoint_bytes=checkpoint_bytes(config, shape),
        rates=rates,
    )


def largest_micro_batch(plan: Plan) -> int | None:
    """The largest power of two as micro_batch_size with which the plan fits; None if one response is too much."""
    share = plan.config.mini_batch_size // plan.num_processes
    launch = (plan.num_processes, plan.sharded)
    sizes = [2**k for k in range(max(1, share.bit_length()))]
    return max((size for size in sizes if plan.changed(*launch, micro_batch_size=size).fits), default=None)


def find_lengths(config: TrainConfig, shape: ModelShape, prompt: int | None = None, mean: int | None = None) -> Lengths:
    """The lengths that are given, and for the others what `plan_training` says."""
    prompt = max(1, config.max_new_tokens // 8) if prompt is None else prompt
    longest = min(config.max_new_tokens, (shape.context or math.inf) - prompt)
    if prompt < 1 or longest < 1:
        raise InputError(f"prompts of {prompt} tokens leave no room in a context of {shape.context}; give shorter ones")
    return Lengths(prompt, longest, min(longest, max(1, config.max_new_tokens // 4) if mean is None else mean))


def _steps(config: TrainConfig, questions: int | None) -> int | None:
    limits = [] if config.steps is None else [config.steps]
    if config.epochs is not None and questions is not None:
        limits.append(config.epochs * questions // config.questions_per_step)
    return min(limits, default=None)


def _describe_run(plan: Plan) -> Iterator[str]:
    config, shape, lengths = plan.config, plan.shape, plan.lengths
    trained = trained_parameters(shape, config.lora_rank)
    yield (
        f"{config.model}: {shape.parameters:,} parameters, {'all' if config.lora_rank is None else f'{trained:,}'} "
        f"trained in {config.precision}; {shape.layers} layers of width {shape.hidden:,}, vocabulary {shape.vocab:,}"
    )
    yield (
        f"Assumed: prompts of at most {lengths.prompt:,} tokens (an eighth of max_new_tokens unless given), responses "
        f"of {lengths.mean:,} in the mean (a quarter) and {lengths.longest:,} at most."
    )


def _describe_memory(plan: Plan) -> Iterator[str]:
    """A table, a row per part and a column per moment; and on which machines that fits."""
    unit, name = (GIB, "GiB") if plan.peak >= GIB else (2**20, "MiB")
    yield f"{name} in {_launch(plan)} at most, with micro_batch_size {plan.config.micro_batch_size}:"
    moments = sorted(plan.memory.values(), key=len, reverse=True)  # so that the parts of training come first
    parts = list(dict.fromkeys(part for moment in moments for part in moment))
    yield " " * 24 + "".join(f"{moment:>16}" for moment in plan.memory)
    for part in parts:
        sizes = (moment.get(part) for moment in plan.memory.values())
        yield f"{part:24}" + "".join(" " * 16 if size is None else f"{size / unit:16.2f}" for size in sizes)
    yield f"{'total':24}" + "".join(f"{sum(moment.values()) / unit:16.2f}" for moment in plan.memory.values())
    if plan.config.engine == "vllm":
        yield (
            f"vLLM's share holds its weights and, at a time, the keys and values of {plan.vllm_responses:,.0f} "
            "responses of full length."
        )
    yield f"On GPUs of {plan.device_memory:g} GiB, of which {USABLE:.0%} are counted on:"
    # Adapters need no shards: the trainer refuses them under FSDP.
    launches = [(1, False), (8, False)] + ([(4, True), (8, True)] if plan.config.lora_rank is None else [])
    own = (plan.num_processes, plan.sharded)
    for launch in launches if own in launches else [own, *launches]:
        yield f"  {_verdict(plan.changed(*launch))}"


def _verdict(plan: Plan) -> str:
    needed, largest = f"{plan.peak / GIB:,.1f} GiB", largest_micro_batch(plan)
    if plan.fits:
        return f"{_launch(plan)}: fits ({needed}), up to micro_batch_size {largest}"
    if largest is not None:
        return f"{_launch(plan)}: fits with micro_batch_size {largest} (as it is: {needed})"
    return f"{_launch(plan)}: does not fit ({needed})"


def _launch(plan: Plan) -> str:
    if plan.num_processes == 1:
        return "one process"
    shared = "FSDP: all shared" if plan.sharded else "DDP: the gradient shared"
    return f"each of {plan.num_processes} processes ({shared})"


def _describe_step(plan: Plan) -> Iterator[str]:
    config, total = plan.config, sum(plan.flops.values())
    batches = "as many batches as the data hold" if plan.steps is None else f"{plan.steps:,} batches in all"
    yield (
        f"A batch: {config.questions_per_step} questions × {config.group_size} responses, {plan.tokens_expected:,} "
        f"tokens with their prompts, at most {plan.tokens_at_most:,}; optimizer steps: {plan.optimizer_steps}; "
        f"{batches}."
    )
    shares = ", ".join(f"{name} {flops / total:.0%}" for name, flops in plan.flops.items())
    yield f"FLOPs of a batch: {total:.3g} ({shares})."
    yield (
        f"KV cache: {kv_bytes(plan.shape, config.precision) / 2**10:,.0f} KiB a token. A checkpoint: "
        f"{plan.checkpoint_bytes / GIB:.2f} GiB on disk."
    )
    if seconds := plan.seconds:
        whole = sum(seconds.values())
        yield (
            f"Seconds of a batch on {plan.rates.machine}, in one process: {whole:.3g} ("
            + ", ".join(f"{name} {part:.3g}" for name, part in seconds.items())
            + (")." if plan.steps is None else f"); {describe_seconds(plan.steps * whole)} in all.")
            + " Of machines that were tried, batches were within a factor of 1.5 of it, their parts within 2."
        )
