"""The accelerators of a node, the device of a rank, and its utilisation. No TensorFlow.

Each vendor's runtime shows a process the devices that a variable names. Schedulers set it, so that their choice is
narrowed and never widened; if it is not set, the kernel's own files count the node's devices.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hpcdl.core.errors import HpcdlError
from hpcdl.core.paths import own_program
from hpcdl.core.units import parse_list


def _nvidia(root: Path) -> int:
    """Count the device files from /dev/nvidia0 on; /dev/nvidiactl and others belong to the driver."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in (root / "dev").glob("nvidia*"))


def _amd(root: Path) -> int:
    """Count the nodes of the kernel's compute topology with a GPU's number; processors have the number 0."""
    numbers = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(path.read_text(encoding="ascii").strip() not in ("", "0") for path in numbers)


def _not_counted(root: Path) -> int:
    """Return 0: the count is left to the vendor's runtime, which shows all devices."""
    return 0


VENDORS: Sequence[tuple[str, Callable[[Path], int]]] = (
    ("CUDA_VISIBLE_DEVICES", _nvidia),
    ("ROCR_VISIBLE_DEVICES", _amd),
    ("HIP_VISIBLE_DEVICES", _not_counted),
    ("ZE_AFFINITY_MASK", _not_counted),
)
"""The variable of each runtime (NVIDIA's, AMD's two, Intel's), and the function that counts devices if it is not set.

Only NVIDIA's was run on hardware (docs/reference/gpu.md).
"""
_UNNAMED = "GPU"
_PATIENCE_S = 240
"""Time limit for TensorFlow's import, from a busy parallel file system."""


@dataclass(frozen=True, kw_only=True)
class DeviceClaim:
    """The device of a rank: the value of `variable` for it, one of `available` that the node's ranks share.

    `available` is also 1 if the scheduler has given this rank a device of its own.
    """

    variable: str
    device: str
    available: int
    shared_out: bool
    """Whether the ranks of the node choose from the same devices, so that the same name means the same device."""


def cpus_near(root: Path = Path("/")) -> list[frozenset[int]]:
    """Return the CPUs near each NVIDIA device, in the order of PCI addresses; empty if the kernel does not tell."""
    addresses = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    files = [root / "sys/bus/pci/devices" / address.lower() / "local_cpulist" for address in addresses]
    return [frozenset(parse_list(path.read_text(encoding="ascii").strip()) if path.is_file() else ()) for path in files]


def nearest(number: int, near: Sequence[Collection[int]], cpus_by_rank: Sequence[Collection[int]]) -> list[int]:
    """Return a device for each rank of a node: the one nearest to its CPUs whose share of ranks is not full.

    `near` are the CPUs near each of the `number` devices; without them ranks take the devices in turn.
    """
    if len(near) != number:
        return [rank % number for rank in range(len(cpus_by_rank))]
    most = -(-len(cpus_by_rank) // number)
    chosen: list[int] = []
    for cpus in cpus_by_rank:
        load = Counter(chosen)
        free = [device for device in range(number) if load[device] < most]
        # A full share is left out before, so that no device gets two ranks while another has none.
        ranked = {device: (-len({*cpus} & {*near[device]}), load[device], device) for device in free}
        chosen.append(min(free, key=ranked.__getitem__))
    return chosen


def cpus_near_shown(environment: Mapping[str, str], root: Path = Path("/")) -> list[frozenset[int]]:
    """Return `cpus_near` if `environment` shows every device of the node in its order; else an empty list.

    That is so without a list of devices, and with the scheduler's list for a job that has the whole node. In other
    lists the numbers may be relative to the job's own devices.
    """
    near = cpus_near(root)
    every = ",".join(map(str, range(len(near))))
    return near if environment.get("CUDA_VISIBLE_DEVICES", every).replace(" ", "") == every else []


def shown(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, int]:
    """Return the number of devices that the ranks of this node share, by the kernel's name of their kind."""
    claim = choose(environment, 0, root=root)
    if claim is None:
        return {}
    name = _UNNAMED
    if claim.variable == "CUDA_VISIBLE_DEVICES":
        files = [path / "information" for path in (root / "proc/driver/nvidia/gpus").glob("*")]
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file()]
        kinds = {kind for text in texts for kind in re.findall(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)}
        name = kinds.pop() if len(kinds) == 1 else _UNNAMED
    return {name + (" (MIG)" if claim.device.startswith("MIG-") else ""): claim.available}


def described(devices: Mapping[str, int]) -> str:
    """Return `4 x NVIDIA H100`; empty without any."""
    return ", ".join(f"{number} x {name}" for name, number in devices.items())


@dataclass(frozen=True, kw_only=True)
class SeenByTensorflow:
    """The devices that this Python's TensorFlow sees, and what it is built for: `CUDA 12.5`, `ROCm` or nothing."""

    version: str
    built_for: str
    seen: int


def ask_tensorflow(environment: Mapping[str, str]) -> SeenByTensorflow:
    """Ask TensorFlow in a new process what it sees under `environment`. Raises HpcdlError if it does not answer."""
    line = own_program("hpcdl.supervision.devices_seen")
    try:
        finished = subprocess.run(
            line, env=dict(environment), capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise HpcdlError(f"TensorFlow cannot be asked for GPUs: no answer in {_PATIENCE_S} s") from None
    if finished.returncode:
        last = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise HpcdlError(f"TensorFlow cannot be asked for GPUs: {last}")
    # The last line: libraries may print something before it.
    return SeenByTensorflow(**json.loads(finished.stdout.strip().splitlines()[-1]))


def devices_of_node(root: Path = Path("/")) -> int:
    """Return the number of devices that the kernel knows, whatever the environment shows."""
    return next((number for _, count in VENDORS if (number := count(root))), 0)


def vendor_of_node(root: Path = Path("/")) -> str:
    """Return the variable of the runtime whose devices the kernel knows; empty for none."""
    return next((variable for variable, count in VENDORS if count(root)), "")


def choose(
    environment: Mapping[str, str],
    local_rank: int,
    cpus_by_rank: Sequence[Collection[int]] = (),
    root: Path = Path("/"),
) -> DeviceClaim | None:
    """Return the device of the `local_rank`-th rank of a node; None if there is none, or none is wanted.

    `cpus_by_rank` are the CPUs that the launch plan gives the ranks of the node, if it has any.
    Ranks take the entries of a list in the environment in turn: numbers, UUIDs or MIG instances. If the list holds all
    devices in their order, they take the nearest, as without a list. A list of one entry is kept unchanged: the
    scheduler may have given every rank its own device under the same number. An empty list means none.
    """
    near = cpus_near_shown(environment, root)
    for variable, _ in VENDORS:
        if variable in environment:
            names = [part.strip() for part in environment[variable].split(",") if part.strip()]
            if not names or names[0] == "-1":  # to CUDA, -1 means no device
                return None
            by_rank = nearest(len(names), near if len(names) == len(near) else [], cpus_by_rank)
            turn = by_rank[local_rank] if local_rank < len(by_rank) else local_rank % len(names)
            return DeviceClaim(
                variable=variable,
                device=names[turn],
                available=len(names),
                shared_out=len(names) > 1,
            )
    for variable, count in VENDORS:
        if number := count(root):
            planned = nearest(number, near, cpus_by_rank)
            device = planned[local_rank] if local_rank < len(planned) else local_rank % number
            return DeviceClaim(variable=variable, device=str(device), available=number, shared_out=True)
    return None


def take(claim: DeviceClaim | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Show this process only the claimed device; call it before TensorFlow's import."""
    if claim is not None:
        environment[claim.variable] = claim.device
        # Numbers of the kernel and of nvidia-smi; CUDA's own order has the fastest device first.
        # Only as a default: a user who set the order has numbered the devices by it.
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        _taken.append(claim)


def claimed() -> DeviceClaim | None:
    """Return the last claim that this process has taken."""
    return _taken[-1] if _taken else None


_taken: list[DeviceClaim] = []


INTERVAL_S, PATIENCE_S = 5, 2
_NVIDIA, _AMD = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
_MIG = "MIG-"
"""Prefix of the name of a partial device, for which the driver reports no utilisation."""
_AMD_USE = "GPU use (%)"


class GpuUse:
    """Context manager that samples the utilisation of the claimed device every INTERVAL_S seconds.

    It is the driver's value: the share of time in which any process's kernel ran on the device. The first sample covers
    the time before the first step, and does not count. Nothing is sampled without a claim, or if the program does not
    answer. nvidia-smi samples in a loop and ends with its pipe; rocm-smi runs for each sample. Neither outlives a rank
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
        """The mean utilisation, 0 to 1; None without samples, for example in a run of a few seconds."""
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
            self._asked.kill()  # first: the thread that reads its output ends with it
        if self._looks is not None:
            self._looks.join(PATIENCE_S)
        if self._asked is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging driver must not delay the run
                self._asked.wait(PATIENCE_S)

    def _look_by(self, way: Callable[[], None]) -> None:
        self._looks = threading.Thread(target=way, name="gpu-use", daemon=True)
        self._looks.start()

    def _read(self) -> None:
        """Read the output of nvidia-smi, one line per sample."""
        assert self._asked is not None and self._asked.stdout is not None
        with self._asked.stdout as lines:
            # The first sample is of the time before the first step.
            for line in itertools.islice(lines, 1, None):
                self._note(line)

    def _ask(self) -> None:
        """Run rocm-smi for each sample; it counts devices as the runtime does."""
        assert self._claim is not None
        line = ["rocm-smi", "--device", self._claim.device, "--showuse", "--json"]
        for look in itertools.count():
            try:
                answer = subprocess.run(
                    line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INTERVAL_S, check=True
                )
                # The first answer is of the time before the first step.
                if look:
                    self._note(str(json.loads(answer.stdout)[f"card{self._claim.device}"][_AMD_USE]))
            except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
                return  # it is missing, or answers in another form
            if self._over.wait(INTERVAL_S):
                return

    def _note(self, percent: str) -> None:
        with contextlib.suppress(ValueError):  # `[N/A]`, or an error message
            self._sum += float(percent)
            self._number += 1
