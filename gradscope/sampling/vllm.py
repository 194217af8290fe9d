"""Sampling with vLLM in this process: its engine holds a copy of the weights, which `sync` updates in place."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import isnan, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.errors import InputError, NanLogitsError
from gradscope.policy import DTYPES, Policy
from gradscope.runs import Progress, settle_progress
from gradscope.sampling.hf import check_prompts, check_settings
from gradscope.sampling.protocol import Sample

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
"""Environment variables set for vLLM unless the user has set them."""
LOWEST_TEMPERATURE = 0.01
"""vLLM's minimum; it replaces lower temperatures by this one."""
CPU_CACHE = 1 << 30
"""Bytes of the KV cache on a CPU, if VLLM_CPU_KVCACHE_SPACE is not set."""


class VLLMSampler:
    """Samples with vLLM from the full softmax(logits / temperature), with prefix caching.

    A response depends on the generator, the index of its prompt and its own index; what is decoded together with it
    only affects rounding. Everything runs in this process; under `accelerate launch`, each process has its own engine
    on its GPU (works with two processes on a CPU, not tested on GPUs).
    """

    def __init__(
        self,
        policy: Policy,
        *,
        dtype: str | torch.dtype | None = None,
        memory: float = 0.4,
        progress: bool | Progress = True,
    ) -> None:
        """Start an engine with the weights in the policy's folder.

        dtype: of the engine's weights and activations; default the policy's.
        memory: fraction of the GPU's memory for weights and KV cache.
        progress: whether, or where, to report sampling; True on a terminal: vLLM's own bar.

        Raises InputError if vLLM is not installed or cannot start, or if the policy has no folder.
        """
        if not os.path.isfile(os.path.join(policy.path, "config.json")):
            raise InputError(
                f"vLLM loads a policy from its folder, but {policy.path or 'this one, made in memory,'} has no "
                "config.json; save it with save_pretrained, or sample with HFSampler"
            )
        self.progress = progress
        self._policy, self._stops = policy, sorted(policy.stop_ids)
        self._group_is_anothers = torch.distributed.is_available() and torch.distributed.is_initialized()
        settings = {"dtype": _dtype_name(dtype or policy.dtype), "gpu_memory_utilization": memory}
        settings["max_model_len"] = -1  # the policy's context, as far as memory allows
        engine, on_cpu = _import_vllm()
        if on_cpu:
            # With the default blocks of 128 tokens, short prompts would share no prefix.
            settings |= {"enforce_eager": True, "block_size": 32}
            if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
                settings["kv_cache_memory_bytes"] = CPU_CACHE
        if self._group_is_anothers and torch.distributed.get_world_size() > 1:
            settings["distributed_executor_backend"] = "external_launcher"
        try:
            with warnings.catch_warnings(action="ignore"), _process_state_kept():
                self._llm = engine(
                    policy.path,
                    **settings,
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # ignore the folder's top-p, top-k and stop tokens
                    logprobs_mode="processed_logprobs",  # at the temperature
                    enable_prefix_caching=True,
                    use_tqdm_on_load=False,
                )
        except ValueError as error:  # unsupported architecture, length or fraction of memory
            words = " ".join(str(error).split())
            raise InputError(f"vLLM cannot start: {words[:400]}; change that, or use the engine hf") from error
        if self._group_is_anothers:
            # At exit, vLLM would destroy process groups that their owners have already destroyed.
            finalizer = getattr(self._llm.llm_engine.engine_core, "_finalizer", None)
            if finalizer is not None:
                finalizer.detach()

    def sample(
        self,
        prompt_ids: list[list[int]],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> list[list[Sample]]:
        """Sample n responses to each prompt, until a stop token, max_new_tokens or the end of the context.

        greedy: the log-probabilities are NaN unless the temperature is 1, since vLLM only has them at 1.
        Raises InputError for prompts that are empty, fill the context or have ids outside the vocabulary, for a
        temperature that vLLM would change, and if a response might exceed the KV cache.
        """
        check_settings(n, temperature, max_new_tokens)
        if temperature < LOWEST_TEMPERATURE and not greedy:
            raise InputError(f"temperature is {temperature}; vLLM samples at {LOWEST_TEMPERATURE} at least")
        check_prompts(prompt_ids, self._policy)
        lengths = [self._longest(len(ids), max_new_tokens) for ids in prompt_ids]
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        distinct = 1 if greedy else n
        keys = [(p, s) for p in range(len(prompt_ids)) for s in range(distinct)]
        own_bar = self.progress is True and sys.stderr.isatty()
        told = settle_progress(False if own_bar else self.progress).stage(f"sampling {len(keys):,} responses")
        with told, _process_state_kept(), torch.autocast(self._policy.device.type, enabled=False):
            outputs = self._llm.generate(
                [{"prompt_token_ids": prompt_ids[p]} for p, _ in keys],
                [self._request(lengths[key[0]], 0.0 if greedy else temperature, seed, key) for key in keys],
                use_tqdm=own_bar,
            )
        known = not greedy or temperature == 1
        samples = {key: self._read(out.outputs[0], known) for key, out in zip(keys, outputs, strict=True)}
        return [[samples[p, s % distinct] for s in range(n)] for p in range(len(prompt_ids))]

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights into the engine: every parameter by its name in the transformers model, unsharded.

        A tied parameter is given once. Clears the prefix cache.
        """
        pairs = ((name, weight.detach()) for name, weight in weights)
        with _process_state_kept(), torch.no_grad():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
            self._llm.apply_model(_repack_head)
            forgotten = self._llm.reset_prefix_cache()
        if not forgotten:
            raise RuntimeError("vLLM did not clear its prefix cache after new weights: requests are still running")

    def close(self) -> None:
        """Free the engine's memory; if it shares an existing process group, only when the process ends."""
        # vLLM's shutdown would destroy the default process group, which is the trainer's.
        if self._llm is None or self._group_is_anothers:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _longest(self, prompt_length: int, max_new_tokens: int) -> int:
        """Return the longest possible response to a prompt of this length."""
        room = self._llm.model_config.max_model_len
        longest = min(max_new_tokens, (self._policy.context or room) - prompt_length)
        if prompt_length + longest > room:
            raise InputError(
                f"a prompt of {prompt_length} tokens with a response of up to {longest} exceeds the {room} that vLLM's "
                "KV cache can hold; lower max_new_tokens, or give vLLM a larger fraction of the memory"
            )
        return longest

    def _request(self, length: int, temperature: float, seed: int, key: tuple[int, int]) -> Any:
        """Return the sampling parameters of one response; its random numbers depend only on its key."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=temperature,
            max_tokens=length,
            seed=int(np.random.default_rng([seed, *key]).integers(2**62)),
            stop_token_ids=self._stops,
            ignore_eos=True,  # only the policy's stop tokens count
            logprobs=0,  # only of the sampled token
            detokenize=False,
        )

    def _read(self, output: Any, known: bool) -> Sample:
        ids = list(output.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, ids, strict=True)]
        if any(map(isnan, logprobs)):
            raise NanLogitsError(
                "the policy's logits are NaN: its weights or its dtype are broken; try --dtype float32"
            )
        return Sample(ids, logprobs if known else [nan] * len(ids), ids[-1] in self._stops)


def _import_vllm() -> tuple[Any, bool]:
    """Import vLLM; return its engine class and whether it is the CPU build."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise InputError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is set, but weights can only be synchronised within one process; unset it"
        )
    try:
        with warnings.catch_warnings(action="ignore"), _process_state_kept():  # deprecations in vLLM's imports
            from vllm import LLM
            from vllm.platforms import current_platform
    except ImportError as error:
        raise InputError(
            f"vLLM cannot be imported ({str(error).splitlines()[0]}); on a machine with GPUs run "
            "pip install 'gradscope[vllm]', or make vllm for the CPU build; or use the engine hf"
        ) from error
    return LLM, current_platform.is_cpu()


def _dtype_name(dtype: str | torch.dtype) -> str:
    names = [name for name in DTYPES if name != "float64"]
    name = str(dtype).removeprefix("torch.")
    if name not in names:
        raise InputError(f"vLLM does not compute in {name}; give {', '.join(names)}")
    return name


def _repack_head(model: Any) -> None:
    """Repack a tied head on a CPU, where vLLM uses a packed copy that reload_weights does not update."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """Restore the random states and, on a CPU, torch.set_num_threads, which vLLM changes."""
    python, numpy, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
