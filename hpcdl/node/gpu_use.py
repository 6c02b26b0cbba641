"""How busy a rank's GPU is while the rank computes, by the driver's own program, nvidia-smi. No TensorFlow."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
from types import TracebackType

from hpcdl.node.accelerators import DeviceClaim

INTERVAL_S, PATIENCE_S = 5, 2
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_MIG = "MIG-"
"""Begins the name of a part of a device, of which the driver tells no utilisation."""


class GpuUse:
    """Context: inside, the utilisation of the claimed device is noted every INTERVAL_S seconds.

    It is NVIDIA's: the share of time in which a kernel ran on the device, of all processes. The first look is of the
    time before the first step, and does not count. Nothing is noted without a claim, or where no nvidia-smi answers.
    The program ends with its pipe, so that it outlives no rank.
    """

    def __init__(self, claim: DeviceClaim | None) -> None:
        self._claim = claim
        self._asked: subprocess.Popen[str] | None = None
        self._reads = threading.Thread(target=self._read, name="gpu-use", daemon=True)
        self._sum, self._number = 0.0, 0

    @property
    def mean(self) -> float | None:
        """The mean utilisation, 0 to 1; None where none was noted, as where all is over in a few seconds."""
        return self._sum / self._number / 100 if self._number else None

    def __enter__(self) -> GpuUse:
        claim = self._claim
        if claim is not None and claim.variable == _VARIABLE and not claim.device.startswith(_MIG):
            line = ["nvidia-smi", f"--id={claim.device}", "--query-gpu=utilization.gpu",
                    "--format=csv,noheader,nounits", f"--loop={INTERVAL_S}"]  # fmt: skip
            with contextlib.suppress(OSError):
                self._asked = subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                self._reads.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._asked is not None:
            self._asked.kill()
            self._reads.join(PATIENCE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs holds up no run
                self._asked.wait(PATIENCE_S)

    def _read(self) -> None:
        assert self._asked is not None and self._asked.stdout is not None
        with self._asked.stdout as lines:
            for line in itertools.islice(lines, 1, None):
                with contextlib.suppress(ValueError):  # `[N/A]`, or a complaint
                    self._sum += float(line)
                    self._number += 1
