"""The utilisation of a rank's GPU, with fakes that answer as the drivers' programs: the tests need no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcdl.node import accelerators
from hpcdl.node.accelerators import DeviceClaim, GpuUse
from tests.training_runs import wait_for

ANSWERS = '#!/bin/sh\necho $$ > {folder}/pid\necho "$@" > {folder}/asked\n{lines}\n'


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH for a fake nvidia-smi."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def answers(folder: Path, lines: str) -> None:
    """Make nvidia-smi run these shell lines."""
    program = folder / "nvidia-smi"
    program.write_text(ANSWERS.format(folder=folder, lines=lines))
    program.chmod(0o755)


def claim(device: str, variable: str = "CUDA_VISIBLE_DEVICES") -> DeviceClaim:
    return DeviceClaim(variable=variable, device=device, available=1, shared_out=False)


def test_the_mean_of_what_the_driver_says(driver: Path) -> None:
    answers(driver, "echo 0\necho 80\necho '[N/A]'\necho 100\ntouch $(dirname $0)/said\nexec sleep 60")
    with GpuUse(claim("GPU-8f2a")) as use:
        wait_for((driver / "said").exists)
    assert use.mean == pytest.approx(0.9)
    asked = (driver / "asked").read_text().split()
    assert {"--id=GPU-8f2a", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"} <= {*asked}
    assert not Path("/proc", (driver / "pid").read_text().strip()).exists(), "it ends with the training"


def test_a_training_that_is_over_before_the_second_look_says_nothing(driver: Path) -> None:
    """A training that ends before the second sample has no utilisation: the first one is older and would say 0 %."""
    answers(driver, "echo 0\ntouch $(dirname $0)/said\nexec sleep 60")
    with GpuUse(claim("0")) as use:
        wait_for((driver / "said").exists)
    assert use.mean is None


@pytest.mark.parametrize("lines", ["exit 9", "echo 'No devices were found'; exit 6", "echo '[Not Supported]'"])
def test_a_driver_that_does_not_answer(lines: str, driver: Path) -> None:
    answers(driver, lines)
    with GpuUse(claim("0")) as use:
        wait_for((driver / "asked").exists)
    assert use.mean is None


def test_amds_program_is_asked_each_time(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rocm-smi runs for each sample: the first (0 %) is older than the training, then 60 % and 80 % count."""
    monkeypatch.setattr(accelerators, "INTERVAL_S", 0.05)
    program = driver / "rocm-smi"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {driver}/asked\ncase $(wc -l < {driver}/asked) in 1) use=0;; 2) use=60;; 3) use=80;; '
        f'*) touch {driver}/said; exit 1;; esac\necho \'{{"card2": {{"GPU use (%)": "\'$use\'"}}}}\'\n'
    )
    program.chmod(0o755)
    with GpuUse(claim("2", "ROCR_VISIBLE_DEVICES")) as use:
        wait_for((driver / "said").exists)
    assert use.mean == pytest.approx(0.7)
    assert {*(driver / "asked").read_text().splitlines()} == {"--device 2 --showuse --json"}


@pytest.mark.parametrize("answer", ["{}", '{"card0": {"GPU use (%)": "N/A"}}', "no such device", "[1]"])
def test_what_amds_program_may_say_otherwise(answer: str, driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "INTERVAL_S", 0.05)
    program = driver / "rocm-smi"
    program.write_text(f"#!/bin/sh\necho x >> {driver}/asked\necho '{answer}'\n")
    program.chmod(0o755)
    with GpuUse(claim("0", "ROCR_VISIBLE_DEVICES")) as use:
        time.sleep(0.5)
    assert use.mean is None and (driver / "asked").exists()


@pytest.mark.parametrize(
    "what", [None, claim("MIG-1c"), claim("GPU-7a", "ROCR_VISIBLE_DEVICES"), claim("0", "ZE_AFFINITY_MASK")]
)
def test_devices_of_which_no_program_says_anything(what: DeviceClaim | None, driver: Path) -> None:
    answers(driver, "echo 80")
    with GpuUse(what) as use:
        pass
    assert use.mean is None and not (driver / "asked").exists()


def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with GpuUse(claim("0")) as use:
        pass
    assert use.mean is None


def test_it_does_not_outlive_a_killed_rank(driver: Path) -> None:
    answers(driver, "while echo 50; do sleep 0.1; done")
    program = (
        "import time\nfrom hpcdl.node.accelerators import DeviceClaim\nfrom hpcdl.node.accelerators import GpuUse\n"
        "claim = DeviceClaim(variable='CUDA_VISIBLE_DEVICES', device='0', available=1, shared_out=False)\n"
        "with GpuUse(claim):\n    time.sleep(60)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: (driver / "pid").exists() and bool((driver / "pid").read_text().strip()))
        time.sleep(0.3)
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    asked = Path("/proc", (driver / "pid").read_text().strip())
    wait_for(lambda: not asked.exists() or "Z" in (asked / "stat").read_text().split()[2])
