"""`hpcdl bench precision` as users run it; it finds equal precisions to be equal."""

from __future__ import annotations

import pytest

from tests.conftest import CommandLine


@pytest.mark.mpi
@pytest.mark.soak
def test_as_a_user_runs_it(run_hpcdl: CommandLine) -> None:
    line = ["bench", "precision", "--model", "lenet", "--batch-size", "4", "--epochs", "2", "--repeats", "1", "--json"]
    finished = run_hpcdl(line)
    assert finished.code == 0, finished.err
    found = finished.json()
    assert 1e-5 < found["outputs"] < 0.1 and 1e-5 < found["gradients"] < 0.5, "bfloat16 has 8 bits"
    assert "/" in found["variable"] and found["precision"] == "mixed_bfloat16"
    accuracy = found["digits"]["accuracy"]
    assert set(accuracy) == {"float32", "mixed_bfloat16"} and found["digits"]["seeds"] == [0]
    assert all(0.8 < reached[0] <= 1 for reached in accuracy.values()), "360 digits, two epochs"


def test_float32_does_not_differ_from_itself() -> None:
    from hpcdl.models.load import load_model
    from hpcdl.step.measure import compare, made_up_batches

    batch = next(made_up_batches(load_model("lenet"), 2, 0))
    same = compare(lambda: load_model("lenet"), batch, "float32")
    assert same.outputs == same.gradients == 0
    lower = compare(lambda: load_model("lenet"), batch, "mixed_bfloat16")
    assert lower.outputs > 0 and lower.gradients > 0


def test_slips_are_reported_before_anything_is_loaded(ask_hpcdl: CommandLine) -> None:
    for words, reported in (
        (["--model", "lenett"], "lenet"),
        (["--model", "lenet", "--precision", "float32"], "float32"),
    ):
        finished = ask_hpcdl(["bench", "precision", *words])
        assert finished.code == 2 and reported in finished.err and len(finished.err.splitlines()) == 1, finished.err
