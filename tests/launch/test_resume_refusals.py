"""A run is resumed with the data and settings of its start, or the error names those that differ."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcdl.config.load import Layer, ResolvedConfig, all_settings, load
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import Matters, Setting
from hpcdl.core.errors import ConfigError, UnknownNameError
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.format.manifest import Field
from hpcdl.run import rundir
from hpcdl.run.plan import keeps_bytes
from tests.conftest import CommandLine
from tests.training_runs import record_of

GIVEN = {"model": "lenet", "data": "synthetic:mnist"}
OTHER: dict[str, Any] = {
    "str": "other", "int": 77, "bytes": 77, "amount": 77, "seconds": 77.0, "interval": 77.0, "Path": "other",
    "count": 77, "trace": "full", "compression": "bf16", "accuracy": 0.77,
}  # fmt: skip


def config(**values: Any) -> ResolvedConfig[TrainConfig]:
    return load(TrainConfig, [Layer(origin="test", values={**GIVEN, **values})])


def another(item: Setting) -> Any:
    """Return a value that is not the setting's default."""
    if item.choices:
        return next(choice for choice in item.choices if choice != item.default)
    if item.kind == "float":
        return 0.77 + (item.limits["above"] or 0.0)
    return not item.default if item.kind == "bool" else OTHER[item.kind]


@pytest.mark.parametrize(
    "item", [item for item in all_settings(TrainConfig) if item.key not in ("data", "allow")], ids=lambda item: item.key
)
def test_a_setting_that_changes_results_is_refused_with_both_values(item: Setting, tmp_path: Path) -> None:
    begun, value = config(), another(item)
    rundir.create(tmp_path, begun, {rundir.CHECKSUM: "c1"})
    rundir.check_resumed(tmp_path, begun.config, "c1")
    changed = config(**{item.key: value}).config
    assert item.matters is not None
    if Matters.RESULT not in item.matters:
        rundir.check_resumed(tmp_path, changed, "c1")
        return
    before = GIVEN.get(item.key, item.show(item.default))
    with pytest.raises(ConfigError) as refused:
        rundir.check_resumed(tmp_path, changed, "c1")
    (problem,) = refused.value.problems
    assert problem.startswith(
        f"--{item.key}: {tmp_path} began with {before}, now it is {item.show(item.parse(value))};"
    )
    allowed = dataclasses.replace(changed, checkpoint=dataclasses.replace(changed.checkpoint, allow=(item.key,)))
    rundir.check_resumed(tmp_path, allowed, "c1")


def test_of_the_data_the_content_counts(tmp_path: Path) -> None:
    rundir.create(tmp_path, config(data="/first"), {rundir.CHECKSUM: "c1"})
    rundir.check_resumed(tmp_path, config(data="/second").config, "c1")
    for data in ("/first", "/second"):
        with pytest.raises(
            ConfigError, match=rf"--data: .* began with /first \(checksum c1\), now it is {data} \(.* c2"
        ):
            rundir.check_resumed(tmp_path, config(data=data).config, "c2")
        rundir.check_resumed(tmp_path, config(data=data, allow="data").config, "c2")


def test_a_run_from_before_scale_continues_with_bytes_divided_by_255_or_is_refused(tmp_path: Path) -> None:
    rundir.create(tmp_path, config(), {rundir.CHECKSUM: "c1"})
    rundir.check_resumed(tmp_path, config().config, "c1", keeps_bytes=True)
    path = tmp_path / rundir.CONFIG_FILE
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("scale =")))
    with pytest.raises(ConfigError, match=r"--scale: .* began with 0\.\.1, now it is auto; give what it began with"):
        rundir.check_resumed(tmp_path, config().config, "c1", keeps_bytes=True)
    rundir.check_resumed(tmp_path, config(scale="0..1").config, "c1", keeps_bytes=True)
    rundir.check_resumed(tmp_path, config(allow="scale").config, "c1", keeps_bytes=True)
    rundir.check_resumed(tmp_path, config().config, "c1")  # for images auto does the same


@pytest.mark.parametrize(("dtype", "shape", "kept"), [
    ("uint8", (5,), True), ("uint8", (9, 9, 3), False), ("float32", (5,), False), ("uint8", (9, 9, 2), True),
])  # fmt: skip
def test_auto_keeps_bytes_that_are_no_pictures(dtype: str, shape: tuple[int, ...], kept: bool) -> None:
    item = Field(name="x", role="input", dtype=dtype, shape=shape)
    dataset = dataclasses.replace(open_dataset("synthetic:mnist"), fields=(item,), pictures=False, scale="auto")
    assert keeps_bytes(dataset) is kept
    assert dtype != "uint8" or dataset.scales(shape) is not kept


def test_what_is_allowed_is_a_setting(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'learning-rate'"):
        rundir.check_resumed(tmp_path, config(allow="learning_rates").config, "c1")


@pytest.mark.long
def test_every_difference_is_reported_before_anything_is_written(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    data, run_dir = tmp_path / "data", tmp_path / "run"
    shutil.copytree(shards, data)
    words = ["train", "--model", "lenet", "--strategy", "single", "--data", data, "--profile", "none", "--run-dir",
             run_dir, "--batch-size", "16", "--epochs", "2"]  # fmt: skip
    assert session_hpcdl([*words, "--time-limit", "1ms"]).code == 75
    before = (run_dir / "run.toml").read_bytes()
    shutil.rmtree(data)
    assert session_hpcdl(["shard", "synthetic:28x28x1:10", data, "--samples", "600"]).code == 0
    resume = [*words, "--resume", "--time-limit", "1h", "--learning-rate", "0.05"]
    refused = session_hpcdl(resume)
    assert refused.code == 2, refused.err
    reported = refused.err.splitlines()
    assert len(reported) == 2 and "began with 0.01, now it is 0.05" in reported[0] and "checksum" in reported[1], (
        reported
    )
    assert (run_dir / "run.toml").read_bytes() == before
    finished = session_hpcdl([*resume, "--allow", "data", "--allow", "learning-rate"])
    assert finished.code == 0, finished.err
    assert (
        "resumed with --allow data,learning-rate: part of it ran with other settings" in record_of(run_dir)["warnings"]
    )


@pytest.mark.long
def test_a_run_that_has_finished_keeps_its_results(session_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    words = ["train", "--model", "lenet", "--strategy", "single", "--data", shards, "--profile", "none", "--run-dir",
             run_dir, "--batch-size", "16", "--resume"]  # fmt: skip
    assert session_hpcdl([*words, "--steps", "4"]).code == 0
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    again = session_hpcdl([*words, "--steps", "4"])
    assert again.code == 0 and "has finished, nothing is left to resume" in again.err, again.err
    further = session_hpcdl([*words, "--steps", "8"])
    assert further.code == 2 and "has finished at step 4 and kept no checkpoint to continue from" in further.err, (
        further.err
    )
    assert f"--init-weights '{run_dir}/model.keras', or" in further.err, "it is accepted as typed"
    assert {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before
