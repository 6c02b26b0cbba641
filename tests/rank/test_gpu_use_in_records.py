"""GPU utilisation in records of training, inference and scripts; TensorFlow's devices and nvidia-smi are simulated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hpcdl.core.records.run_record import read_record
from tests.conftest import ROOT, CommandLine

FILE = ROOT / "tests/rank/played_gpu.py"
NAME = "GPU of a play"
NVIDIA_SMI = '#!/bin/sh\necho "$@" >> {folder}/asked\nfor answer in 0 80 90; do echo $answer; done\nexec sleep 60\n'
SCRIPT = """
import sys, time
import hpcdl
hpcdl.init()
sys.path.insert(0, sys.argv[1])
import played_gpu
time.sleep(1)
"""


@pytest.fixture
def node(tmp_path: Path) -> Mapping[str, str]:
    """The environment of a node whose driver first reports 0 %, as at a start, then 80 % and 90 %."""
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(folder=tmp_path))
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "3"}


def in_record(hpcdl: CommandLine, node: Mapping[str, str], words: Sequence[str | Path], place: Path) -> None:
    """Run a command on that node; assert that the record in `place` has the GPU, and the mean without the start."""
    finished = hpcdl(words, env=node)
    assert finished.code == 0, finished.err
    record = read_record(place)
    assert record.accelerators == {NAME: 1} and not record.warnings
    assert record.rank_records[0].gpu_utilisation == pytest.approx(0.85)


@pytest.mark.long
def test_training_and_inference(run_hpcdl: CommandLine, node: Mapping[str, str], shards: Path, tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    words = ["train", "--model", "lenet", "--data", shards, "--strategy", "single", "--batch-size", "16"]
    words += ["--preprocess", f"{FILE}:slowly", "--steps", "10", "--run-dir", run_dir]
    in_record(run_hpcdl, node, words, run_dir)
    in_record(run_hpcdl, node, ["infer", run_dir, "--data", shards, "--out", out], out)
    assert (tmp_path / "asked").read_text().count("--id=3 ") == 2


def test_a_script(run_hpcdl: CommandLine, node: Mapping[str, str], tmp_path: Path) -> None:
    script, run_dir = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    in_record(run_hpcdl, node, ["run", "--run-dir", run_dir, "--", script, FILE.parent], run_dir)


@pytest.mark.long
def test_a_script_that_computes_on_processors_says_nothing(
    run_hpcdl: CommandLine, node: Mapping[str, str], tmp_path: Path
) -> None:
    """A script that computes on processors has no utilisation of a GPU that it claimed and TensorFlow does not see."""
    script, run_dir = tmp_path / "script.py", tmp_path / "run"
    script.write_text("import time, tensorflow\ntime.sleep(1)\n")
    finished = run_hpcdl(["run", "--run-dir", run_dir, "--", script], env=node)
    assert finished.code == 0, finished.err
    record = read_record(run_dir)
    assert record.rank_records[0].gpu_utilisation is None and "TensorFlow sees no GPU" in record.warnings[0]
    assert (tmp_path / "asked").exists()
