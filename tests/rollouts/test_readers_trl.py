"""TRL's completions, as its own GRPOTrainer writes them: read back as what it sampled, up to what text loses."""

from __future__ import annotations

import pytest
from support.dumps import run_trl
from support.policies import BOS, EOS, PAD, save_checkpoint

from gradscope import load_policy
from gradscope.rollouts import read_dump

SPECIAL = {PAD, BOS, EOS}


@pytest.mark.filterwarnings("ignore")  # TRL's and transformers' own
@pytest.mark.parametrize("conversational", [False, True], ids=["text", "chat"])
def test_what_trl_wrote_is_what_it_sampled_without_special_tokens(tmp_path, conversational):
    pytest.importorskip("trl")
    model = save_checkpoint(tmp_path / "model", "llama", chat=True)
    sampled = run_trl(model, tmp_path / "out", conversational=conversational)
    dump = read_dump(tmp_path / "out" / "completions", load_policy(model))
    assert dump.format == "trl"
    known = [
        (entry["step"], prompt, [i for i in completion if i not in SPECIAL], advantage)
        for entry in sampled
        for prompt, completion, advantage in zip(
            entry["prompt_ids"], entry["completion_ids"], entry["advantages"], strict=True
        )
    ]
    known = [row for row in known if row[2]]
    assert len(known) > 4
    for row, (step, prompt, completion, advantage) in enumerate(known):
        ids, targets = dump.batch.sequence(row)
        assert ids.tolist() == prompt + completion
        assert dump.batch.advantages[row, targets[0] if len(targets) else 0] == pytest.approx(advantage)
        assert int(dump.steps[row]) == step
    assert len(dump.batch) == len(known)
    assert sum("left out" in note for note in dump.notes) == (len(known) < sum(len(e["advantages"]) for e in sampled))
