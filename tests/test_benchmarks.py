"""The benchmark's methods measure the same thing, so that their times can be compared."""

import warnings

import pytest

from analyses.benchmarks.token_gradients import METHODS, Options, benchmark


def test_every_method_of_the_benchmark_gives_the_same_norms():
    pytest.importorskip("opacus")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus and torch.func warn about their own internals.
        table = benchmark("S", 12, Options(repeats=1, sequences=2, measured_sequences=1))
    assert list(table["method"]) == list(METHODS)
    # float32 autograd on both sides.
    assert (table["max_relative_error"] < 1e-5).all()
    assert table["speed_up_of_gradscope"].iloc[-1] == 1
