"""TRL's GRPOTrainer: one real step of a tiny policy for every pair of settings, and for some alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from analyses.docs.conformance.row import Step, cover_pairs, judge
from gradscope.integrations.trl import batch_from_trl
from gradscope.policy import load_policy
from gradscope.runs import is_first, launched, leave_launch, write_json
from gradscope.updates import TrainedLoss
from tests.support.processes import launch
from tests.support.trl_runs import TEMPERATURE, Recorder, gradients, make_trainer, train

SIZE = 8
"""Responses of an optimizer step."""
LEVELS: dict[str, Sequence[Any]] = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "gradient_accumulation_steps": (1, 2),
    "num_iterations": (1, 2),
    "beta": (0.0, 0.1),
    "lora": (False, True),
    "importance_sampling_level": ("token", "sequence"),
    "generation": (1, 2),
}
"""Setting → levels; generation: optimizer steps that one generation's responses are cut into."""
OF_RESPONSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types whose formula has a place for a ratio of a whole response."""
PLAIN = {name: levels[0] for name, levels in LEVELS.items()} | {"loss_type": "dapo"}
SINGLE: tuple[dict[str, Any], ...] = (
    {"num_iterations": 2, "delta": 1.1},
    {"num_iterations": 2, "delta": 3.0, "epsilon_high": 0.28},
    {"beta": 0.1, "use_bias_correction_kl": False},
    {"beta": 0.1, "importance_sampling_level": "sequence", "num_iterations": 2},
    {"loss_type": "grpo", "beta": 0.1, "importance_sampling_level": "sequence"},
    {"gradient_accumulation_steps": 2, "entropy_coef": 0.1},
    {"entropy_coef": 0.1},
    {"top_entropy_quantile": 0.2},
    {"gradient_accumulation_steps": 2, "top_entropy_quantile": 0.5},
    {"loss_type": "luspo", "importance_sampling_level": "token", "num_iterations": 2},
    {"mask_truncated_completions": True},
    {"loss_type": "grpo", "mask_truncated_completions": True},
    {"loss_type": "dr_grpo", "mask_truncated_completions": True},
    {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "mask_truncated_completions": True},
)
"""Settings that the pairs leave at their defaults, a case each."""
IN_TWO: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_steps": 2},
    {"loss_type": "bnpo"},
    {"loss_type": "grpo"},
    {"entropy_coef": 0.1},
)
"""Settings that two processes try."""
DOCUMENTED = {
    "grpo": "mean over responses of token means",
    "dapo": "mean over the tokens of the global accumulated batch",
    "cispo": "mean over the tokens of the global accumulated batch",
    "bnpo": "mean over the tokens of the local batch",
    "dr_grpo": "division by responses × max_completion_length",
    "luspo": "mean over responses, each times its length",
    "sapo": "",
    "vespo": "",
}
"""The average that the documentation of `loss_type` names."""
OF_ALL = ("grpo", "dr_grpo")
"""Averages over responses, of which the documentation does not say whether excluded ones count."""
EOS = 2


def cases() -> list[dict[str, Any]]:
    """Return the settings of every row."""

    def allowed(case: Mapping[str, Any]) -> bool:
        of_responses = case["importance_sampling_level"] == "sequence"
        return (not of_responses or case["loss_type"] in OF_RESPONSES) and (
            of_responses or case["loss_type"] != "luspo"
        )

    pairs = cover_pairs(LEVELS, allowed)
    for case in pairs:  # KL times a response's ratio has rows of its own
        if case["importance_sampling_level"] == "sequence" and case["beta"]:
            case["use_bias_correction_kl"] = False
    return [*pairs, *(PLAIN | one for one in SINGLE)]


def describe(case: Mapping[str, Any]) -> tuple[str, str]:
    """Return the settings that are not TRL's defaults, and the average that is documented."""
    told = [f"loss_type={case['loss_type']}"]
    told += [f"{name}={value}" for name, value in case.items() if value != PLAIN.get(name) and name != "loss_type"]
    words = ", ".join(told).replace("lora=True", "LoRA").replace("generation=2", "steps_per_generation=2×accumulation")
    return words, DOCUMENTED[case["loss_type"]]


def run(case: Mapping[str, Any], checkpoint: Path, folder: Path) -> Step:
    """Train to the last step on one generation's responses, and return that step; in every process of a launch."""
    given, own = dict(case), LEVELS.keys() - {"lora", "generation"}
    count, processes = given["gradient_accumulation_steps"], launched()
    size = SIZE // count // processes
    settings = {name: value for name, value in given.items() if name in own or name not in LEVELS}
    settings |= {"per_device_train_batch_size": size, "learning_rate": 3e-3, "max_completion_length": 12}
    settings["steps_per_generation"] = count * given["generation"]
    settings |= {"max_steps": given["num_iterations"] * given["generation"]}
    if given["loss_type"] == "cispo":
        settings["epsilon_high"] = 1.05
    trainer = make_trainer(checkpoint, folder, peft=make_lora() if given["lora"] else None, **settings)
    _move(trainer.model)
    shorten(trainer)
    recorder, before = Recorder(trainer), folder / "before"
    trainer.add_callback(Saver(trainer, before, settings["max_steps"]))
    train(trainer)
    step, args = recorder.steps[-1], trainer.args
    window = gather_object(step["window"])
    batch = batch_from_trl(window, TEMPERATURE)
    policy = load_policy(before, params="adapter") if given["lora"] else load_policy(before)
    unsaid = args.mask_truncated_completions and given["loss_type"] in OF_ALL
    unsaid |= args.top_entropy_quantile < 1 and count > 1  # whether the quantile is the step's
    divisors = None if unsaid else divide(given["loss_type"], window, args.max_completion_length)
    by_response = args.beta and args.use_bias_correction_kl and args.importance_sampling_level == "sequence"
    told = {"fault": "kl-sequence-ratio" if by_response else None, "processes": processes}
    return Step(policy, batch, step["gradient"], documented_loss(args), size, divisors, **told)


def divide(kind: str, window: Sequence[Mapping[str, Tensor]], longest: int) -> Tensor | None:
    """Return the divisor that the documentation gives to each response's terms; None: it names none."""
    lengths = [inputs["completion_mask"].sum(1).double().clamp(min=1) for inputs in window]
    kept = [inputs["completion_mask"].sum().double() for inputs in window]
    size = sum(map(len, lengths))
    per_response = torch.cat(lengths)
    known = {
        "grpo": per_response * size,
        "bnpo": torch.cat([n.expand(len(own)) * len(window) for n, own in zip(kept, lengths, strict=True)]),
        "dr_grpo": torch.full((size,), float(size * longest)),
        "luspo": torch.full((size,), float(size)),
    }
    known["dapo"] = known["cispo"] = torch.full((size,), float(sum(kept)))
    return known.get(kind)


def documented_loss(args: Any) -> TrainedLoss:
    """Return the documented loss at a token, as gradscope writes it."""
    high, dual = args.epsilon if args.epsilon_high is None else args.epsilon_high, args.delta
    weighting = {"cispo": f"cispo:eps_high={high}", "sapo": "sapo", "vespo": "vespo"}.get(args.loss_type)
    if args.importance_sampling_level == "sequence":
        weighting = f"gspo:eps_low={args.epsilon},eps_high={high}"
    if args.top_entropy_quantile < 1:
        weighting = f"top-entropy:q={args.top_entropy_quantile}"
    if dual is not None:  # "enables the upper clipping bound in the two-sided GRPO loss"
        high, dual = min(high, dual - 1), max(dual, 1 + high)
    corrected = bool(args.use_bias_correction_kl) and args.importance_sampling_level == "token"
    settings = {"kl_coef": args.beta, "kl_corrected": corrected, "weighting": weighting}
    return TrainedLoss(args.epsilon, high, dual, **settings, entropy_coef=args.entropy_coef)


class Saver(TrainerCallback):
    """Saves the weights before the last step, and keeps its gradient."""

    def __init__(self, trainer: Any, folder: Path, last: int) -> None:
        self.trainer, self.folder, self.last = trainer, folder, last

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.last - 1:
            self.trainer.save_model(str(self.folder))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.gradient = gradients(self.trainer.model)


def make_lora() -> Any:
    """Return the settings of a small adapter."""
    import peft

    return peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def _move(model: Any) -> None:
    """Move what is trained away from the reference."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.03 * torch.randn(parameter.shape, generator=draw)


def shorten(trainer: Any) -> None:
    """Cut responses to unequal lengths; every second one ends in EOS, the others count as truncated."""
    generate, number = trainer._generate_single_turn, trainer.accelerator.process_index
    draw = torch.Generator().manual_seed(number)

    def shorter(*args: Any, **keywords: Any) -> Any:
        found = generate(*args, **keywords)
        ids, *rest = found if isinstance(found, tuple) else (found,)
        lengths = torch.randint(3, 13, (len(ids),), generator=draw).tolist()
        cut = [own[:length] for own, length in zip(ids, lengths, strict=True)]
        cut = [[*own[:-1], EOS] if place % 2 else own for place, own in enumerate(cut)]
        return (cut, *rest) if rest else cut

    trainer._generate_single_turn = shorter


def steps(checkpoint: Path, folder: Path) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Iterate over trainers, cases, what is documented, and functions that take the step."""
    for number, case in enumerate(cases()):
        yield ("TRL GRPOTrainer", *describe(case)), partial(run, case, checkpoint, folder / f"grpo{number}")


def rows_of_processes(checkpoint: Path, folder: Path) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Iterate over the same of cases in two processes, with functions that make the row."""
    for number, case in enumerate(IN_TWO):
        words, documented = describe(PLAIN | case)
        make = partial(_launch, case, checkpoint, folder / f"two{number}")
        yield ("TRL GRPOTrainer", f"{words}, two processes", documented), make


def _launch(case: Mapping[str, Any], checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Run a case in two processes, and return the columns that the first one makes."""
    first, second = launch("-m", "analyses.docs.conformance.trl_grpo", json.dumps(case), checkpoint, folder)
    if first.status or second.status:
        raise RuntimeError((first if first.status else second).stderr.strip().splitlines()[-1])
    return json.loads((folder / "row.json").read_text())


def main(case: str, checkpoint: str, folder: str) -> None:
    """Run a case of PLAIN's as one of several processes; the first writes FOLDER/row.json."""
    step = run(PLAIN | json.loads(case), Path(checkpoint), Path(folder))
    if is_first():
        write_json(Path(folder) / "row.json", judge(step))
    leave_launch()


if __name__ == "__main__":
    main(*sys.argv[1:])
