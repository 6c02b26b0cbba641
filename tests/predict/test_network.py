"""Values that `--network` accepts, and those that it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.predict.network import network_names, read_network

BENCH = {
    "library": "x", "ranks": 2, "nodes": 2, "repeats": 3, "link": {"latency_s": 2e-6, "seconds_per_byte": 1e-10},
    "rows": [{"algorithm": "ring", "bytes": 1 << 20, "seconds": 3e-4, "bus_bandwidth": 1, "share_of_bound": 1}],
}  # fmt: skip


@pytest.mark.parametrize("name", network_names())
def test_every_named_network_says_where_its_numbers_come_from(name: str) -> None:
    network = read_network(name)
    assert network.name == name and network.sources and network.summary
    assert 0 < (network.latency_s or 0) < 1e-3 < 1e7 < (network.bytes_per_second or 0)


@pytest.mark.parametrize(
    ("text", "latency_s", "bytes_per_second"),
    [
        ("2us,12.5GB", 2e-6, 12.5e9),
        ("0.7e-6,5GB/s", 0.7e-6, 5e9),
        ("1ms, 100MB", 1e-3, 1e8),
        ("50 us,1GiB", 5e-5, 2**30),
    ],
)
def test_two_numbers_are_a_network(text: str, latency_s: float, bytes_per_second: float) -> None:
    network = read_network(text)
    assert network.latency_s == pytest.approx(latency_s) and network.bytes_per_second == pytest.approx(bytes_per_second)


def test_a_measured_all_reduce_is_a_network(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(BENCH))
    network = read_network(str(path))
    assert network.bytes_per_second == pytest.approx(1e10) and network.measured[0].seconds == 3e-4
    path.write_text(json.dumps(BENCH | {"nodes": 1}))
    inside = read_network(str(path))
    assert inside.bytes_per_second is None and inside.memory_bytes_per_second == pytest.approx(1e10)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2us,0", "bytes_per_second is 0"),
        ("0us,1GB", "latency_s is 0"),
        ("-1us,1GB", "no latency"),
        ("fast,1GB", "no latency"),
        ("2us,fast", "not a size"),
        ("2us,1GB,3", "not a size"),
        ("infinibad", "unknown network"),
        ("missing/file.toml", "no such file"),
        ("missing.json", "no such file"),
    ],
)
def test_what_is_no_network_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_network(text)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.toml", "bytes_per_second = 0", "more than nothing"),
        ("a.toml", "bytes_per_second = -1e9", "more than nothing"),
        ("a.toml", "bytes_per_second = inf", "more than nothing"),
        ("a.toml", "bytes_per_second = 'fast'", "give a number"),
        ("a.toml", "latency = 1", "did you mean 'latency_s'"),
        ("a.toml", "latency_s = ", "a.toml"),
        ("a.toml", "sources = 'me'", "no list"),
        ("a.json", "{}", "neither"),
        ("a.json", "[1, 2]", "neither"),
        ("a.json", "nonsense", "neither"),
        ("a.json", json.dumps(BENCH | {"ranks": 1}), "larger --sizes"),
        ("a.json", json.dumps(BENCH | {"link": {"latency_s": 1e-6, "seconds_per_byte": 0}}), "larger --sizes"),
        ("a.json", json.dumps(BENCH | {"rows": [BENCH["rows"][0] | {"seconds": -1}]}), "larger --sizes"),  # type: ignore[index]
    ],
)  # fmt: skip
def test_what_a_file_has_wrong_is_reported(tmp_path: Path, name: str, content: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UsageError, match=says):
        read_network(str(path))
