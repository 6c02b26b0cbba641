"""How busy a rank's GPU is while the rank computes, by nvidia-smi or rocm-smi. No TensorFlow."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import threading
from collections.abc import Callable
from types import TracebackType

from hpcdl.node.accelerators import DeviceClaim

INTERVAL_S, PATIENCE_S = 5, 2
_NVIDIA, _AMD = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
_MIG = "MIG-"
"""Begins the name of a part of a device, of which the driver tells no utilisation."""
_AMD_USE = "GPU use (%)"


class GpuUse:
    """Context: inside, the utilisation of the claimed device is noted every INTERVAL_S seconds.

    It is the driver's: the share of time in which a kernel ran on the device, of all processes. The first look is of
    the time before the first step, and does not count. Nothing is noted without a claim, or where the program does not
    answer. nvidia-smi goes on by itself and ends with its pipe; rocm-smi is asked each time. Neither outlives a rank
    for long.
    """

    def __init__(self, claim: DeviceClaim | None) -> None:
        self._claim = claim
        self._asked: subprocess.Popen[str] | None = None
        self._over = threading.Event()
        self._looks: threading.Thread | None = None
        self._sum, self._number = 0.0, 0

    @property
    def mean(self) -> float | None:
        """The mean utilisation, 0 to 1; None where none was noted, as where all is over in a few seconds."""
        return self._sum / self._number / 100 if self._number else None

    def __enter__(self) -> GpuUse:
        claim = self._claim
        if claim is not None and claim.variable == _NVIDIA and not claim.device.startswith(_MIG):
            line = ["nvidia-smi", f"--id={claim.device}", "--query-gpu=utilization.gpu",
                    "--format=csv,noheader,nounits", f"--loop={INTERVAL_S}"]  # fmt: skip
            with contextlib.suppress(OSError):
                self._asked = subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                self._look_by(self._read)
        elif claim is not None and claim.variable == _AMD and claim.device.isdigit():
            self._look_by(self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._asked is not None:
            self._asked.kill()
        if self._looks is not None:
            self._looks.join(PATIENCE_S)
        if self._asked is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs holds up no run
                self._asked.wait(PATIENCE_S)

    def _look_by(self, way: Callable[[], None]) -> None:
        self._looks = threading.Thread(target=way, name="gpu-use", daemon=True)
        self._looks.start()

    def _read(self) -> None:
        """What nvidia-smi writes, a line each time."""
        assert self._asked is not None and self._asked.stdout is not None
        with self._asked.stdout as lines:
            for line in itertools.islice(lines, 1, None):
                self._note(line)

    def _ask(self) -> None:
        """What rocm-smi answers, each time anew; it counts devices as the runtime does."""
        assert self._claim is not None
        line = ["rocm-smi", "--device", self._claim.device, "--showuse", "--json"]
        for look in itertools.count():
            try:
                answer = subprocess.run(
                    line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INTERVAL_S, check=True
                )
                if look:
                    self._note(str(json.loads(answer.stdout)[f"card{self._claim.device}"][_AMD_USE]))
            except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
                return  # it is not there, or answers in another way
            if self._over.wait(INTERVAL_S):
                return

    def _note(self, percent: str) -> None:
        with contextlib.suppress(ValueError):  # `[N/A]`, or a complaint
            self._sum += float(percent)
            self._number += 1
