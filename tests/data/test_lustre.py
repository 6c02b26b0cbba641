"""A fake `lfs` on PATH records the exact commands and answers as the real one: the tests need no Lustre."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest

from hpcdl.config.load import Layer, load
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.data.show.inspection import inspect
from hpcdl.data.write import lustre
from hpcdl.data.write.lustre import FileSystem, Stripes, advised_count, file_system_of, stripes_of
from hpcdl.data.write.plan import make_plan
from hpcdl.data.write.request import LayoutConfig, ShardConfig
from tests.data.sharding import make

FAKE = """#!/bin/sh
printf '%s\\n' "$*" >> {log}
case "$1 $2" in
  "df "*) cat <<'END'
UUID                   1K-blocks        Used   Available Use% Mounted on
scratch-MDT0000_UUID  1000000000   1000000   999000000   1% /scratch[MDT:0]
scratch-OST0000_UUID  9000000000   1000000  8999000000   1% /scratch[OST:0]
scratch-OST0001_UUID  9000000000   1000000  8999000000   1% /scratch[OST:1]
scratch-OST0002_UUID  9000000000   1000000  8999000000   1% /scratch[OST:2]

filesystem_summary:  27000000000   3000000 26997000000   1% /scratch
END
  ;;
  "setstripe "*) exit {set_code} ;;
  "getstripe --component-count") echo {components} ;;
  "getstripe -c") echo 3 ;;
  "getstripe -S") echo 4194304 ;;
esac
"""


@pytest.fixture
def on_lustre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that /proc/mounts calls Lustre; the fake `lfs` writes its log to `calls` beside it."""
    scratch = tmp_path / "scr atch"
    scratch.mkdir()
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/root / ext4 rw 0 0\nmgs:/scratch {str(scratch).replace(' ', chr(92) + '040')} lustre rw 0 0\n"
    )
    monkeypatch.setattr(lustre, "MOUNTS", mounts)
    monkeypatch.setattr(lustre.file_system_of, "__defaults__", (mounts,))  # the default was bound at definition
    fake(tmp_path, monkeypatch)
    return scratch


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_code: int = 0, components: int = 0) -> None:
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    text = FAKE.format(log=shlex.quote(str(tmp_path / "calls")), set_code=set_code, components=components)
    (folder / "lfs").write_text(text)
    (folder / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def calls(tmp_path: Path, word: str) -> list[str]:
    return [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith(word)]


def test_stripes_are_set_on_each_folder_before_the_first_byte(on_lustre: Path, tmp_path: Path) -> None:
    out = on_lustre / "out"
    make(
        "synthetic:mnist",
        out,
        samples=200,
        split="train=0.8,val=0.2",
        stripe_count=2,
        stripe_size="4MiB",
        stripe_pool="flash",
    )
    assert calls(tmp_path, "setstripe") == [
        f"setstripe -c 2 -S 4194304 -p flash {out}/{split}" for split in ("train", "val")
    ]
    found = inspect(out)
    assert found.file_system == "lustre" and found.stripes == Stripes(count=3, size=4194304)
    assert (out / "train" / "shard-00000.h5").stat().st_size > 4194304  # the first block begins at a stripe boundary


def test_one_ost_for_files_under_a_gigabyte(on_lustre: Path, tmp_path: Path) -> None:
    make("synthetic:mnist", on_lustre / "out", samples=99)
    assert calls(tmp_path, "setstripe") == [f"setstripe -c 1 -S 1048576 {on_lustre}/out"]
    assert [advised_count(size * 10**9) for size in (0.5, 5, 50, 500)] == [1, 8, 24, 72]


def test_composite_layouts_are_distinguished(on_lustre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stripes_of(on_lustre / "x").components == 0
    fake(tmp_path, monkeypatch, components=3)
    assert stripes_of(on_lustre / "x") == Stripes(count=3, size=4194304, components=3)
    assert calls(tmp_path, "getstripe")[:3] == [
        f"getstripe {flag} {on_lustre}/x" for flag in ("--component-count", "-c", "-S")
    ]


def test_lfs_that_fails_is_reported_in_one_line(
    on_lustre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch, set_code=22)
    with pytest.raises(HpcdlError, match=r"lfs setstripe .* failed: exit code 22"):
        make("synthetic:mnist", on_lustre / "out", samples=99)


def test_bad_stripes_are_refused(on_lustre: Path) -> None:
    for options in ({"stripe_size": "100000"}, {"stripe_count": 0}):
        with pytest.raises(UsageError, match="--stripe"):
            make("synthetic:mnist", on_lustre / "out", samples=99, **options)
    assert not (on_lustre / "out").exists()


def test_the_mount_is_found_by_its_longest_path(on_lustre: Path, tmp_path: Path) -> None:
    assert file_system_of(on_lustre / "not" / "yet" / "there").kind == "lustre"
    assert file_system_of(on_lustre).num_osts == 3
    assert file_system_of(tmp_path).kind == "ext4"


def layout(**options: object) -> LayoutConfig:
    return load(
        ShardConfig, [Layer(origin="test", values={k.replace("_", "-"): v for k, v in options.items()})]
    ).config.layout


DISK = FileSystem(kind="xfs", free_bytes=10**15)


def test_plan_follows_sizes_and_ranks() -> None:
    imagenet = make_plan({"train": 1_281_167}, 1_281_167 * 150_528, layout(max_ranks=512), DISK)
    assert imagenet.block_samples == 7 and 700 < imagenet.shards["train"] < 740  # 1 MiB and 256 MiB
    tiny = make_plan({"train": 1438}, 1438 * 784, layout(max_ranks=8), DISK)
    assert tiny.shards == {"train": 1} and tiny.block_samples == 1438 // 8
    huge = make_plan({"train": 10**9}, 10**9 * 150_528, layout(), DISK)
    assert huge.shards["train"] <= 10_001
    asked = make_plan({"train": 1000, "val": 3}, 10**8, layout(shards=5, block_size="2MB", max_ranks=8), DISK)
    assert asked.shards == {"train": 5, "val": 3} and asked.block_samples == round(2e6 / (10**8 / 1003))
    spread = make_plan(
        {"train": 10**6}, 4 * 2**30, layout(max_ranks=128), FileSystem(kind="xfs", free_bytes=1, num_osts=64)
    )
    assert spread.shards["train"] == 64
    for split, count in asked.num_samples.items():
        edges = [asked.shard_samples(split, number) for number in range(asked.shards[split])]
        assert edges[0][0] == 0 and edges[-1][1] == count and all(a[1] == b[0] for a, b in itertools.pairwise(edges))
