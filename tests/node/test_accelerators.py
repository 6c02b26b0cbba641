"""The GPU of a rank: from the scheduler's list if it gives one, otherwise from the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdl.node import accelerators
from hpcdl.node.accelerators import choose, cpus_near_shown, described, devices_of_node, nearest, shown


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Two NVIDIA devices, beside the driver's other files."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


@pytest.mark.parametrize(("local_rank", "device"), [(0, "0"), (1, "1"), (2, "0"), (5, "1")])
def test_devices_of_the_node_are_shared_out_in_turn(node: Path, local_rank: int, device: str) -> None:
    claim = choose({}, local_rank, root=node)
    assert claim is not None and claim.shared_out
    assert (claim.variable, claim.device, claim.available) == ("CUDA_VISIBLE_DEVICES", device, 2)


@pytest.mark.parametrize(
    ("listed", "devices"),
    [
        ("2,3", ["2", "3", "2"]),
        ("GPU-8f2a, GPU-11c0", ["GPU-8f2a", "GPU-11c0", "GPU-8f2a"]),
        ("MIG-aa,MIG-bb,MIG-cc", ["MIG-aa", "MIG-bb", "MIG-cc"]),
    ],
)
def test_a_schedulers_list_is_narrowed(node: Path, listed: str, devices: list[str]) -> None:
    claims = [choose({"CUDA_VISIBLE_DEVICES": listed}, rank, root=node) for rank in range(3)]
    assert [claim.device if claim else None for claim in claims] == devices


def test_a_device_that_each_rank_was_given_is_kept_and_says_nothing_of_sharers(node: Path) -> None:
    claim = choose({"CUDA_VISIBLE_DEVICES": "0"}, 1, root=node)
    assert claim is not None and claim.device == "0" and not claim.shared_out


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_hidden_devices_stay_hidden(node: Path, hidden: str) -> None:
    assert choose({"CUDA_VISIBLE_DEVICES": hidden}, 0, root=node) is None
    assert devices_of_node(node) == 2


@pytest.mark.parametrize("variable", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])
def test_other_vendors_lists_are_narrowed_too(tmp_path: Path, variable: str) -> None:
    claim = choose({variable: "4,6"}, 1, root=tmp_path)
    assert claim is not None and (claim.variable, claim.device) == (variable, "6")


def test_amds_devices_are_counted_by_the_kernels_topology(tmp_path: Path) -> None:
    for index, number in enumerate(("0", "41920", "41921")):  # the first entry is the processor
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(index)
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(number + "\n")
    claim = choose({}, 3, root=tmp_path)
    assert claim is not None and (claim.variable, claim.device) == ("ROCR_VISIBLE_DEVICES", "1")


def locate(node: Path) -> None:
    """Write what the driver and kernel report of the two devices: their model and the CPUs near them."""
    for address, cpus in (("0000:41:00.0", "4-7"), ("0000:C1:00.0", "0-3")):
        driver = node / "proc/driver/nvidia/gpus" / address
        driver.mkdir(parents=True)
        (driver / "information").write_text(f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 42\nBus Location: \t {address}\n")
        folder = node / "sys/bus/pci/devices" / address.lower()
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(cpus + "\n")


@pytest.mark.parametrize(
    ("listed", "devices"),
    [
        ("0,1", ["1", "0"]),
        ("0, 1", ["1", "0"]),
        ("1,0", ["1", "0"]),
        ("0,1,2", ["0", "1"]),
        ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
    ],
)
def test_a_list_of_all_devices_in_order_is_no_wish(node: Path, listed: str, devices: list[str]) -> None:
    """Slurm's list of all devices in order is no choice, so ranks take the near one; other lists are used in order."""
    locate(node)
    claims = [
        choose({"CUDA_VISIBLE_DEVICES": listed}, rank, [[0, 1, 2, 3], [4, 5, 6, 7]], root=node) for rank in (0, 1)
    ]
    assert [claim.device if claim else None for claim in claims] == devices


def test_what_a_node_shows_its_ranks(node: Path) -> None:
    assert shown({}, node) == {"GPU": 2}, "the driver tells no kind"
    locate(node)
    assert shown({}, node) == shown({"CUDA_VISIBLE_DEVICES": "0,1"}, node) == {"NVIDIA H200": 2}
    assert shown({"CUDA_VISIBLE_DEVICES": "1"}, node) == {"NVIDIA H200": 1}
    assert shown({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c"}, node) == {"NVIDIA H200 (MIG)": 3}
    assert shown({"CUDA_VISIBLE_DEVICES": ""}, node) == {}
    assert shown({"ROCR_VISIBLE_DEVICES": "0,1"}, node) == {"GPU": 2}
    assert described(shown({}, node)) == "2 x NVIDIA H200"


def test_nearness_is_known_of_all_devices_or_none(node: Path) -> None:
    assert cpus_near_shown({}, node) == []
    locate(node)
    near = [frozenset(range(4, 8)), frozenset(range(4))]
    assert cpus_near_shown({}, node) == cpus_near_shown({"CUDA_VISIBLE_DEVICES": "0,1"}, node) == near
    assert cpus_near_shown({"CUDA_VISIBLE_DEVICES": "0"}, node) == [], "it may be the second one, counted again"


def test_ranks_take_the_device_near_their_processors(node: Path) -> None:
    """Ranks take the near device: two sockets of four CPUs, devices numbered in reverse order, as on many nodes."""
    locate(node)
    planned = [[0, 1], [2, 3], [4, 5], [6, 7]]
    claims = [choose({}, rank, planned, root=node) for rank in range(4)]
    assert [claim.device if claim else None for claim in claims] == ["1", "1", "0", "0"]
    two = [choose({}, rank, [[0, 1, 2, 3], [4, 5, 6, 7]], root=node) for rank in range(2)]
    assert [claim.device if claim else None for claim in two] == ["1", "0"]


def test_devices_that_no_rank_is_near_go_in_turn() -> None:
    far = [frozenset({8}), frozenset({9}), frozenset({10})]
    assert nearest(3, far, [[0], [1], [2], [3]]) == [0, 1, 2, 0]
    assert nearest(2, [], [[0], [1], [2]]) == [0, 1, 0]


def test_a_node_without_devices_claims_nothing(tmp_path: Path) -> None:
    assert choose({}, 0, root=tmp_path) is None
    environment: dict[str, str] = {}
    accelerators.take(None, environment)
    assert environment == {}
