"""What a training run would take: memory of each process by moment, tokens and FLOPs of a step, disk; no weights."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gradscope.batch_logprobs import CHUNK
from gradscope.cost import (
    BYTES,
    ModelShape,
    Piece,
    backward_flops,
    embedding_gradient_bytes,
    forward_flops,
    kv_bytes,
    loss_bytes,
    optimizer_bytes,
    recompute_bytes,
    sampling_bytes,
    scoring_bytes,
    state_bytes,
    trained_parameters,
    working_weights_bytes,
)
from gradscope.errors import InputError
from gradscope.models import BROKEN_FILE, EMBEDDED
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.presets import ARCHITECTURES

Number = int | float

GIB = 2**30
USABLE = 0.9
"""Share of a GPU's memory that a plan counts on: the rest goes to the driver, to kernels and to fragmentation."""


@dataclass(frozen=True)
class Lengths:
    """How long the texts are taken to be, in tokens."""

    prompt: int
    longest: int
    """Response that the memory must hold."""
    mean: int
    """Response that times and FLOPs are counted for."""


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
    """Of a step: prompts and responses of full length."""
    tokens_expected: int
    """Of a step, with responses of the assumed mean length."""
    optimizer_steps: int
    """Of one batch of responses."""
    steps: int | None
    """Batches of the whole run; None: it depends on how many questions the data hold."""
    flops: Mapping[str, Number]
    """Of one step, in all processes together, with responses of the assumed mean length: by what they are for."""
    checkpoint_bytes: Number
    """On disk."""

    @property
    def peak(self) -> Number:
        """Bytes of one process at the moment that takes most."""
        return max(sum(parts.values()) for parts in self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within USABLE of the GPU, and vLLM's share holds its weights and one response."""
        return self.peak <= USABLE * self.device_memory * GIB and self.vllm_responses >= 1

    @property
    def vllm_responses(self) -> Number:
        """Responses of full length whose keys and values vLLM's share holds at a time; infinite without vLLM."""
        if self.config.engine != "vllm":
            return math.inf
        room = self.config.vllm_memory * self.device_memory * GIB - _weights_bytes(self.config, self.shape)
        return room // (kv_bytes(self.shape, self.config.precision) * (self.lengths.prompt + self.lengths.longest))

    def changed(self, num_processes: int, sharded: bool, *, micro_batch_size: int | None = None) -> Plan:
        """The same run, launched otherwise."""
        config = self.config if micro_batch_size is None else replace(self.config, micro_batch_size=micro_batch_size)
        return replace(
            self,
            config=config,
            num_processes=num_processes,
            sharded=sharded,
            memory=_memory(config, self.shape, self.lengths, num_processes, sharded, self.device_memory),
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
) -> Plan:
    """What a step of this configuration takes with a network of this shape.

    sharded: the processes share weights, gradients and optimizer (FSDP); else each has them whole (DDP).
    device_memory: GiB of each process's GPU.
    prompt_tokens: of the longest prompt; default an eighth of max_new_tokens. mean_response: default a quarter of it.
    questions: how many the data hold, for the length of a run that is given in epochs.
    Raises InputError where prompts leave no room in the context.
    """
    lengths = _lengths(config, shape, prompt_tokens, mean_response)
    passes = 1 if config.lopti_eta is None else 2
    return Plan(
        config=config,
        shape=shape,
        num_processes=num_processes,
        sharded=sharded,
        device_memory=device_memory,
        lengths=lengths,
        memory=_memory(config, shape, lengths, num_processes, sharded, device_memory),
        tokens_at_most=config.num_responses * (lengths.prompt + lengths.longest),
        tokens_expected=config.num_responses * (lengths.prompt + lengths.mean),
        optimizer_steps=passes * math.ceil(config.num_responses / config.mini_batch_size),
        steps=_steps(config, questions),
        flops=_flops(config, shape, lengths, passes),
        checkpoint_bytes=_checkpoint_bytes(config, shape),
    )


def largest_micro_batch(plan: Plan) -> int | None:
    """The largest power of two as micro_batch_size with which the plan fits; None if one response is too much."""
    share = plan.config.mini_batch_size // plan.num_processes
    launch = (plan.num_processes, plan.sharded)
    sizes = [2**k for k in range(max(1, share.bit_length()))]
    return max((size for size in sizes if plan.changed(*launch, micro_batch_size=size).fits), default=None)


def shape_of(model: str) -> ModelShape:
    """The shape of "embedded", of a folder with config.json, or of a model of the presets, without its weights.

    Raises InputError for any other name, and for a folder whose config.json is not a causal language model's.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

    folder = EMBEDDED if model == "embedded" else Path(model)
    if not os.path.isfile(folder / "config.json"):  # of a name that is too long, Path raises
        if model not in ARCHITECTURES:
            raise InputError(
                f"the network of {model!r} is not known here; give a folder with its config.json (the weights need not "
                f"be there), or one of embedded, {', '.join(ARCHITECTURES)}"
            )
        return ModelShape.from_config(Qwen2Config(**ARCHITECTURES[model]))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (*BROKEN_FILE, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".!:")
        raise InputError(f"{folder}/config.json is not one that transformers reads ({reason}); save it anew") from error
    if getattr(config, "is_encoder_decoder", False) or type(config) not in AutoModelForCausalLM._model_mapping:
        raise InputError(f"{folder} is a {config.model_type} model, not a causal language model; give one that is")
    return ModelShape.from_config(config)


def _lengths(config: TrainConfig, shape: ModelShape, prompt: int | None, mean: int | None) -> Lengths:
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


def _memory(
    config: TrainConfig, shape: ModelShape, lengths: Lengths, processes: int, sharded: bool, device_memory: Number
) -> dict[str, dict[str, Number]]:
    """What lies in one process's memory at each moment of a step."""
    shards = processes if sharded else 1
    state = state_bytes(shape, lora_rank=config.lora_rank, shards=shards)
    resident = state | _beside(config, shape, processes, shards, device_memory)
    without_gradients = {name: size for name, size in resident.items() if name != "gradients"}
    length, precision = lengths.prompt + lengths.longest, config.precision
    piece = Piece(min(config.micro_batch_size, config.mini_batch_size), length, lengths.longest)
    working = working_weights_bytes(shape, precision, shards=shards)
    # Autocast keeps copies of the weights that are trained; those of frozen ones stay only where a graph holds them.
    kept = working if config.lora_rank is None else {}
    graph = kept if config.gradient_checkpointing else working
    settings = {"checkpointing": config.gradient_checkpointing, "lora_rank": config.lora_rank}
    training = [loss_bytes(shape, piece, precision, **settings)]
    training.append(embedding_gradient_bytes(shape, precision, lora_rank=config.lora_rank))
    if config.gradient_checkpointing:
        training.append(recompute_bytes(shape, piece, precision))
    moments = {
        "sampling": without_gradients,
        "scoring": without_gradients | kept | scoring_bytes(shape, piece, precision, chunk=CHUNK),
        "training": resident | graph | max(training, key=lambda parts: sum(parts.values())),
        "optimizer step": resident | kept | optimizer_bytes(shape, lora_rank=config.lora_rank, shards=shards),
    }
    if config.engine == "hf":
        responses = math.ceil(config.questions_per_step / processes) * config.group_size
        decoded = Piece(min(config.sampling_batch_size, responses), length, lengths.longest)
        own = kept if shards == 1 else {}
        moments["sampling"] = without_gradients | own | sampling_bytes(shape, decoded, precision)
    if shards > 1:
        # Policy and reference are loaded whole, one after the other, before they are cut.
        moments = {"loading": {"weights": 4 * shape.parameters * (2 if config.engine == "hf" else 1)}} | moments
    return moments


def _beside(
    config: TrainConfig, shape: ModelShape, processes: int, shards: int, device_memory: Number
) -> dict[str, Number]:
    """What lies in memory all the time beside what is trained."""
    parts = {}
    if config.kl_coef > 0 and config.lora_rank is None:
        parts["reference policy"] = 4 * shape.parameters / shards
    if processes > 1 and shards == 1:
        parts["DDP's buckets"] = 4 * trained_parameters(shape, config.lora_rank)
    if config.engine == "vllm":
        parts["vLLM"] = config.vllm_memory * device_memory * GIB
    elif shards > 1:
        parts["sampling copy"] = _weights_bytes(config, shape)
    return parts


def _weights_bytes(config: TrainConfig, shape: ModelShape) -> Number:
    """Of a copy that only samples."""
    return BYTES[config.precision] * shape.parameters


def _flops(config: TrainConfig, shape: ModelShape, lengths: Lengths, passes: int) -> dict[str, Number]:
    """By part of a step. Each pass of Lopti runs the blocks on whole responses and the head on its own tokens."""
    count, length = config.num_responses, lengths.prompt + lengths.mean
    whole, part = Piece(count, length, lengths.mean), Piece(count, length, math.ceil(lengths.mean / passes))
    forward, backward = forward_flops(shape, part), backward_flops(shape, part, lora_rank=config.lora_rank)
    again = 2 if config.gradient_checkpointing else 1
    gradients = 2 if config.control == "matched-norm" else 1
    return {
        "sampling": forward_flops(shape, whole),
        "scoring": forward_flops(shape, whole) * (2 if config.kl_coef > 0 else 1),
        "training, forward": passes * gradients * forward * again,
        "training, backward": passes * gradients * backward,
    }


def _checkpoint_bytes(config: TrainConfig, shape: ModelShape) -> Number:
    """Whole weights and the optimizer's moments, in float32; with adapters, those by themselves too."""
    trained = trained_parameters(shape, config.lora_rank)
    return 4 * (shape.parameters + 2 * trained + (trained if config.lora_rank is not None else 0))


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
