import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.core.units import (
    common_unit,
    format_bytes,
    format_count,
    format_measure,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_seconds,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("256MiB", 256 * 1024**2), ("1.5GB", 1_500_000_000), ("4096", 4096), ("2 KiB", 2048), ("1k", 1000)],
)
def test_bytes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_a_small_size_needs_its_unit() -> None:
    """64 was taken as 64 bytes: 1,797 shards in place of four."""
    assert [parse_size(text) for text in ("64B", "64 MiB", "0", "1024")] == [64, 64 * 1024**2, 0, 1024]
    for text in ("64", "12.5"):
        with pytest.raises(
            ValueError, match=f"{text} of which unit. Write {text}MiB, {text}KiB or, for bytes, {text}B"
        ):
            parse_size(text)


@pytest.mark.parametrize("text", ["", "MiB", "-5MiB", "5 miles", "1e3", "nan"])
def test_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("10m", 600), ("1h30m", 5400), ("250ms", 0.25), ("01:30:00", 5400), ("1-00:00:00", 86400)],
)
def test_times_are_read_with_their_unit(text: str, expected: float) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "-3s", "1:2", "10m late"])
def test_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a time"):
        parse_seconds(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_written_bytes_can_be_read_again(number: int) -> None:
    assert parse_bytes(format_bytes(number)) == pytest.approx(number, rel=0.01, abs=1)


def test_numbers_for_people() -> None:
    assert format_bytes(25 * 1024**2) == "25 MiB"
    assert format_seconds(0.00321) == "3.21 ms"
    assert format_seconds(8.14e-16) == format_seconds(0.0) == "0 ms"
    assert format_seconds(725) == "12m 05s"
    assert format_seconds(12000) == "3h 20m"
    assert format_count(431080) == "431,080"
    assert format_rate(1234.5, "images") == "1,230 images/s"
    assert [format_measure(value) for value in (0.5, 0.0, 0.00027, -3e-9, 1.23456e9)] == [
        "0.5000", "0.0000", "0.00027", "-3e-09", "1.23e+09",
    ]  # fmt: skip


def test_what_not_all_count_as_images_are_samples() -> None:
    assert common_unit([]) == common_unit(["images", "images"]) == "images"
    assert common_unit(["images", "samples"]) == common_unit(["samples"]) == common_unit(["rows"]) == "samples"
    assert common_unit(json.loads('[["images"], null, {}]')) == "samples"  # records may contain anything
