"""The devices of ranks in a record. There is no GPU here: TensorFlow's answers are simulated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.core.records.run_record import RankRecord, RunRecord
from hpcdl.rank.results import refuse_shared_devices, warnings_of_nodes, with_devices
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine

STARTED = RunRecord(
    strategy="ring", model="lenet", data="d", ranks=3, workers=3, batch_per_rank=1, global_batch=3, warnings=["first"]
)
GPU = {"name": "NVIDIA H200", "shared": "0", "available": 1, "warning": ""}
CPU = {"name": "", "shared": "", "available": 0, "warning": ""}


class Workers:
    """The answers of all workers, of which this process is one."""

    host = "n1"

    def __init__(self, answers: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.answers = [list(answer) for answer in answers]

    def allgather_json(self, _: Any) -> list[Any]:
        return self.answers


def recorded(*answers: tuple[str, dict[str, Any]]) -> RunRecord:
    return with_devices(STARTED, Workers(answers))  # type: ignore[arg-type]  # all that it asks of a communicator


def test_devices_are_counted_by_name() -> None:
    other = {**GPU, "shared": "1", "available": 2}
    record = recorded(("n1", GPU), ("n2", GPU), ("n2", other))
    assert record.accelerators == {"NVIDIA H200": 3} and record.warnings == ["first"]


def test_ranks_that_share_a_device_are_named() -> None:
    record = recorded(("n1", GPU), ("n2", GPU), ("n1", GPU))
    (warning,) = record.warnings[1:]
    assert warning == "ranks 0, 2 share GPU 0 of n1, which has 1: start as many workers a node as it has GPUs"


def test_a_strategy_that_needs_a_gpu_for_each_rank_refuses_shared_ones() -> None:
    shared: Any = Workers((("n1", GPU), ("n2", GPU), ("n1", GPU)))
    with pytest.raises(UsageError, match=r"--strategy nccl: ranks 0, 2 share GPU 0 of n1.*, or use --strategy ring"):
        refuse_shared_devices(STRATEGIES["nccl"], shared)
    refuse_shared_devices(STRATEGIES["grpc-ring"], shared)
    own: Any = Workers((("n1", GPU), ("n2", GPU), ("n2", {**GPU, "shared": "1"})))
    refuse_shared_devices(STRATEGIES["nccl"], own)


def test_workers_on_processors_beside_gpus_are_counted() -> None:
    record = recorded(("n1", GPU), ("n2", CPU), ("n3", CPU))
    assert record.warnings[1:] == ["2 of 3 workers compute on CPUs, the others on GPUs"]


def test_without_gpus_nothing_is_reported() -> None:
    record = recorded(("n1", CPU), ("n2", CPU))
    assert record.accelerators == {} and record.warnings == ["first"]


@pytest.mark.mpi
def test_a_device_that_tensorflow_does_not_see_is_a_warning(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    """A device that TensorFlow does not see causes a warning, as with a TensorFlow without GPU support on a node."""
    words = ["--model", "lenet", "--data", "synthetic:28x28x1:10", "--ranks", "2", "--steps", "2"]
    line = ["train", *words, "--run-dir", str(tmp_path / "run")]
    finished = run_hpcdl(line, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert finished.code == 0, finished.err
    warnings = json.loads((tmp_path / "run/record.json").read_text())["warnings"]
    for rank in (0, 1):
        reported = (
            f"rank {rank}: TensorFlow sees no GPU, though CUDA_VISIBLE_DEVICES names {rank}: it computes on the CPU"
        )
        assert any(warning.startswith(reported) for warning in warnings), warnings
    assert "TensorFlow sees no GPU" in finished.out + finished.err


@pytest.mark.parametrize(
    ("cpus", "threads", "model", "line"),
    [
        (["0", "0"], None, "", "2 workers share 1 processor of vm: they slow each other down"),
        (["0-1", "0-1", "0-1"], 1, "lenet", "3 workers share 2 processors of vm: they slow"),
        (["0-1", "0-1", "0-1"], 1, "emulated:lenet:1s", None),
        (["0", "1"], 1, "lenet", None),
        (["0-3", "0-3"], 2, "lenet", None),
        (["0-3", "0-3"], 4, "lenet", "2 workers with 4 threads each share 4 processors of vm: they slow"),
        (["0-3"], 8, "lenet", None),
        (["", ""], 2, "lenet", None),
        (["0-3", "0-3"], 4, "lenet on GPUs", None),
    ],
)
def test_workers_that_outnumber_their_processors_are_reported(
    cpus: list[str], threads: int | None, model: str, line: str | None
) -> None:
    """Their times would show bad scaling that no larger machine has. A server, which waits, does not count."""
    ranks = [RankRecord(rank=rank, host="vm", role="worker", processors=held) for rank, held in enumerate(cpus)]
    ranks.append(RankRecord(rank=len(cpus), host="vm", role="server", processors="0"))
    gpus = {"NVIDIA H200": 2} if "GPUs" in model else {}
    lines = warnings_of_nodes(replace(STARTED, model=model, intra_op_threads=threads, accelerators=gpus), ranks)
    assert len(lines) == (line is not None) and all(text.startswith(line or "") for text in lines)
