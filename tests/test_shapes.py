"""Shape annotations hold: cheap tests of every room once more, with jaxtyping and beartype around every function.

Checked annotations make the tests half as slow again, so that not all of them pay for it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FILES = (
    *("test_intervals.py", "rollouts/test_batch.py", "objective/test_objective.py", "objective/test_logprobs.py"),
    *("objective/test_batch_logprobs.py", "objective/test_batch_loss.py", "objective/test_trained_logprobs.py"),
    *("gradients/test_weighted_gradients.py", "gradients/test_rules.py", "theory/test_theory.py"),
    *("gradients/test_jacobian.py", "updates/test_make_update.py"),
)
"""Below tests/."""
ONE_EACH = "not (gemma or qwen3 or gpt2 or gpt_neox or opt or phi or llama)"
"""Of architectures, Qwen2 and Mixtral are enough."""
CHECKED = "GRADSCOPE_SHAPES_CHECKED"
HOOK = "--jaxtyping-packages=gradscope,beartype.beartype"


@pytest.mark.all
def test_cheap_tests_of_every_room_pass_with_checked_shapes(repository):
    command = [sys.executable, "-m", "pytest", HOOK, "-q", "-p", "no:cacheprovider", "-k", ONE_EACH, __file__]
    command += [str(repository / "tests" / file) for file in FILES]
    done = subprocess.run(command, cwd=repository, env=os.environ | {CHECKED: "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif(CHECKED not in os.environ, reason="shapes are checked in the process that the test above starts")
def test_a_wrong_shape_is_refused():
    import jaxtyping
    import torch

    from gradscope.theory import rounding_tolerance

    with pytest.raises(jaxtyping.TypeCheckError):
        rounding_tolerance(torch.zeros(3, dtype=torch.int64))  # the log-probabilities are floats
