"""vLLM as a sampler: its numbers are those of the policy's own forward pass, before and after new weights came."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support import policies as tiny
from support.engines import PROMPTS, Engine, full_logprobs, perturbed
from support.policies import EOS, VOCAB
from support.processes import launch
from support.refusals import refused

from analyses.recipes.hasty_analysis import write_hastily
from gradscope.cli import main
from gradscope.errors import NanLogitsError
from gradscope.policy import EMBEDDED, load_policy
from gradscope.rollouts import read_rollouts
from gradscope.sampling import HFSampler, Sample, Sampler
from gradscope.sampling.vllm import VLLMSampler, _process_state_kept
from gradscope.tasks.knights_knaves import compact_prompt, draw_statements
from gradscope.tasks.knights_knaves_wording import COMPACT_NAMES

WITHOUT = importlib.util.find_spec("vllm") is None


def needs_vllm(test: Callable) -> Callable:
    """Its CPU build is half a gigabyte: `make test-all` installs it, and runs these."""
    return pytest.mark.all(pytest.mark.skipif(WITHOUT, reason="not installed here: see what `make vllm` says")(test))


CONTEXT = 128
STOPS = [EOS, *range(40, 46)]
WORKER = """
import os
from contextlib import closing
import torch
from accelerate import Accelerator
from gradscope.policy import load_policy
from gradscope.sampling.vllm import VLLMSampler
from support.engines import Engine, perturbed

accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
policy = load_policy("embedded", device="cpu")
with closing(VLLMSampler(policy, progress=False)) as sampler:
    engine = Engine(policy, sampler)
    # Processes have different prompts of different lengths: nobody waits for another.
    assert engine.drift(policy, seed=rank, n=1 + 2 * rank, max_new_tokens=5 + 9 * rank) < 1e-4
    new = perturbed(policy, seed=1)
    sampler.sync(new.model.named_parameters())
    assert engine.drift(new, seed=rank) < 1e-4
total = torch.ones(1)
torch.distributed.all_reduce(total)
assert total.item() == 2
accelerator.end_training()
print(rank, flush=True)
os._exit(0)  # threads of the process group may abort a Python that ends by itself
"""


def save_checkpoint(folder: Path, name: str) -> Path:
    """A tiny checkpoint with heads of 32, the smallest that vLLM's CPU attention knows.

    Its generation configuration says top-k 1 and other stop tokens than STOPS: neither may have an effect.
    """
    config = tiny.make_config(name)
    config.head_dim, config.max_position_embeddings = 32, CONTEXT
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tiny.fill_parameters(model, seed=0)
    tiny.set_sharpness(model.eval(), model.model.norm, 3.0)
    model.generation_config.update(do_sample=True, top_k=1, eos_token_id=list(range(50, 90)))
    model.save_pretrained(folder)
    return folder


# Untied; tied with biases (Qwen2).
@pytest.fixture(scope="module", params=["llama", "embedded-certain"])
def engine(request, tmp_path_factory) -> Iterator[Engine]:
    if request.param == "embedded-certain":
        policy = load_policy("embedded-certain")
    else:
        policy = load_policy(save_checkpoint(tmp_path_factory.mktemp(request.param), request.param))
        policy.model.generation_config.eos_token_id = STOPS
    with closing(VLLMSampler(policy, progress=False)) as sampler:
        yield Engine(policy, sampler)


@pytest.fixture
def restored(engine) -> Iterator[Engine]:
    """The engine, which gets its first weights back."""
    yield engine
    engine.sampler.sync(engine.policy.model.named_parameters())


def ids(samples: list[list[Sample]]) -> list[list[list[int]]]:
    return [[s.response_ids for s in group] for group in samples]


@needs_vllm
def test_vllms_own_tokenizer_gives_the_embedded_policys_ids():
    from vllm.tokenizers import get_tokenizer

    policy, rng = load_policy("embedded"), random.Random(0)
    theirs = get_tokenizer(str(EMBEDDED["embedded"]))
    for _ in range(1000):
        statements = draw_statements(rng.choice((2, 3, 4, 5)), rng)
        text = compact_prompt(statements) + write_hastily(statements, COMPACT_NAMES, rng=rng)
        assert theirs.encode(text, add_special_tokens=False) == policy.encode_prompt(text)


@needs_vllm
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_a_forward_pass_at_the_sampling_temperature(engine, temperature):
    assert isinstance(engine.sampler, Sampler)
    # Two float32 implementations: 1e-5 or less was seen, at logits of about 10.
    assert engine.drift(engine.policy, temperature=temperature) < 1e-4


@needs_vllm
def test_after_each_sync_the_numbers_are_those_of_the_new_weights(restored):
    first = restored.policy
    second, third = perturbed(first, seed=1), perturbed(first, seed=2)
    assert restored.drift(first) < 1e-4  # and fills the prefix cache
    for now, before in ((second, first), (third, second), (first, third)):
        restored.sampler.sync(now.model.named_parameters())
        assert restored.drift(now) < 1e-4
        assert restored.drift(before) > 1e-2


@needs_vllm
def test_the_prefix_cache_would_be_stale_if_a_sync_did_not_reset_it(restored, monkeypatch):
    restored.sample()
    new = perturbed(restored.policy, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(restored.sampler._llm, "reset_prefix_cache", lambda: True)
        restored.sampler.sync(new.model.named_parameters())
        assert restored.drift(new) > 1e-2
        patch.setattr(restored.sampler._llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(RuntimeError):
            restored.sampler.sync(new.model.named_parameters())


@needs_vllm
def test_a_response_depends_on_the_seed_its_prompt_and_its_own_index(engine):
    few, many = engine.sample(n=2, max_new_tokens=4), engine.sample(n=3, max_new_tokens=6)
    assert ids(few) == ids(engine.sample(n=2, max_new_tokens=4)) != ids(engine.sample(n=2, max_new_tokens=4, seed=1))
    for a, b in zip(few, many, strict=True):
        assert [s.response_ids for s in a] == [s.response_ids[:4] for s in b[:2]]
    same_prompt = engine.sample(prompt_ids=[[4, 5]] * 2, n=4)
    assert len({tuple(s.response_ids) for group in same_prompt for s in group}) > 4


@needs_vllm
def test_the_first_tokens_follow_the_policys_distribution(engine):
    n = 2000
    drawn = [s.response_ids[0] for s in engine.sample(prompt_ids=[[4, 5]], n=n, temperature=0.7, max_new_tokens=1)[0]]
    with torch.no_grad():
        expected = (engine.policy.model(input_ids=torch.tensor([[4, 5]])).logits[0, -1].double() / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(expected)).double()
    big = expected * n > 10
    chi2 = ((counts - n * expected)[big] ** 2 / (n * expected)[big]).sum()
    dof = int(big.sum())
    assert dof >= 2 and chi2 < dof + 5 * (2 * dof) ** 0.5  # five standard deviations of a χ² with that many degrees


@needs_vllm
def test_a_response_ends_with_a_stop_token_of_the_policy_or_at_the_length(engine):
    stops = set(engine.sampler._stops)
    samples = [s for group in engine.sample(n=16) for s in group]
    assert {len(s.response_ids) for s in samples} >= {12}
    for s in samples:
        ended = [t in stops for t in s.response_ids]
        assert not any(ended[:-1]) and ended[-1] == s.finished
        assert s.finished or len(s.response_ids) == 12
        assert len(s.logprobs) == len(s.response_ids)
    if engine.policy.vocab_size == VOCAB:  # the tiny ones
        assert stops == set(STOPS) and {s.finished for s in samples} == {True, False}
        assert any(50 <= t < 90 for s in samples for t in s.response_ids[:-1])  # the folder's stop tokens


@needs_vllm
def test_the_context_ends_a_response_and_what_exceeds_it_or_the_cache_is_refused(engine, monkeypatch):
    context = engine.policy.context
    for room in (1, 3):
        (samples,) = engine.sample(prompt_ids=[[5] * (context - room)])
        assert all(len(s.response_ids) <= room and (s.finished or len(s.response_ids) == room) for s in samples)
    with refused("prompt 1", context):
        engine.sample(prompt_ids=[[5], [5] * context])
    monkeypatch.setattr(engine.sampler._llm.model_config, "max_model_len", 20)
    with refused("10", "20"):
        engine.sample(prompt_ids=[[5] * 10])


@needs_vllm
def test_greedy_responses_are_those_of_transformers(engine):
    settings = {"n": 2, "max_new_tokens": 12, "generator": torch.Generator(), "greedy": True}
    expected = HFSampler(engine.policy, progress=False).sample(PROMPTS, temperature=1.0, **settings)
    at_one = engine.sample(n=2, greedy=True)
    assert ids(at_one) == ids(expected)
    for mine, theirs in zip(at_one, expected, strict=True):
        assert mine[0].logprobs == pytest.approx(theirs[0].logprobs, abs=1e-4)  # float32, as above
        assert mine[0].finished == theirs[0].finished
    elsewhere = engine.sample(n=1, greedy=True, temperature=0.7)
    assert ids(elsewhere) == [group[:1] for group in ids(expected)]
    assert all(math.isnan(p) for group in elsewhere for p in group[0].logprobs)


@needs_vllm
def test_what_cannot_be_sampled_is_refused(engine):
    for settings in ({"n": 0}, {"max_new_tokens": 0}, {"temperature": 0.0}, {"temperature": 0.001}):
        with refused(next(iter(settings))):
            engine.sample(**settings)
    with refused("prompt 1"):
        engine.sample(prompt_ids=[[4], []])
    with refused():
        engine.sample(prompt_ids=[[engine.policy.vocab_size]])


@needs_vllm
def test_weights_that_are_nan_are_refused(restored):
    broken = copy.deepcopy(restored.policy.model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    restored.sampler.sync(broken.named_parameters())
    with pytest.raises(NanLogitsError):
        restored.sample()


def test_what_vllm_does_to_the_process_is_undone():
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate(), torch.set_num_threads
    with pytest.raises(KeyError), _process_state_kept():
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        torch.set_num_threads = None
        raise KeyError
    assert (np.random.get_state()[1].tolist(), random.getstate(), torch.set_num_threads) == state[1:]
    assert torch.equal(torch.get_rng_state(), state[0])


@needs_vllm
def test_the_command_samples_with_vllm(tmp_path):
    out = tmp_path / "rollouts.jsonl"
    command = ["sample", "embedded", "--task", "knights-knaves-compact", "--questions", "2", "--n", "2"]
    command += ["--temperature", "0.7", "--engine", "vllm", "--out", str(out)]
    main(command)
    policy = load_policy("embedded")
    for row in map(json.loads, out.read_text().splitlines()):
        expected = full_logprobs(policy, row["prompt_ids"], row["response_ids"], 0.7).float()
        torch.testing.assert_close(torch.tensor(row["old_logprobs"]), expected, atol=1e-4, rtol=0)
    assert len(read_rollouts(out, policy)) == 4


@needs_vllm
def test_two_processes_have_an_engine_each_and_keep_their_process_group():
    for rank, ended in enumerate(launch("-c", WORKER)):
        assert (ended.status, ended.stdout.split()[-1]) == (0, str(rank)), ended.stderr
        assert "Traceback" not in ended.stderr


def test_without_vllm_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with refused("gradscope[vllm]"):
        VLLMSampler(load_policy("embedded"))


def test_a_policy_that_vllm_cannot_take_is_refused(monkeypatch):
    policy = load_policy("embedded")
    with refused("config.json"):
        VLLMSampler(replace(policy, path=""))
    with refused():
        VLLMSampler(policy, dtype="float64")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with refused("VLLM_ENABLE_V1_MULTIPROCESSING"):
        VLLMSampler(policy)
