"""`hpcdl train` on the digits with real ranks: its accuracy and its files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from hpcdl.cli.training.train import warn_of_affinity
from hpcdl.cluster.status import read_statuses
from hpcdl.core.records.run_record import PARTS, read_record
from hpcdl.core.units import parse_list
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import DIGITS, CommandLine
from tests.training_runs import PLANTED, SHORT, named_weights_in, record_of, same_run, written_by_ranks

pytestmark = pytest.mark.mpi

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hpcdl":
            raise ImportError("hpcdl is not here")
sys.meta_path.insert(0, Block())
import keras, numpy
model = keras.saving.load_model(sys.argv[1])
print(model.predict(numpy.zeros((2, 28, 28, 1), "float32"), verbose=0).shape)
"""


@pytest.fixture(scope="module")
def trained(session_hpcdl: CommandLine, shards: Path) -> Path:
    """A deterministic run of 12 epochs on two ranks."""
    run_dir = session_hpcdl.home / "trained"
    arguments = [*SHORT, "--data", shards, "--epochs", "12", "--run-dir", run_dir]
    finished = session_hpcdl(arguments, timeout_s=300)
    assert finished.code == 0, finished.err
    return run_dir


def test_two_ranks_learn_the_digits(trained: Path) -> None:
    record = read_record(trained)
    assert record.status == "finished"
    assert record.accuracy is not None
    assert record.accuracy >= 0.97
    assert (record.ranks, record.workers, record.nodes, record.global_batch) == (2, 2, 1, 32)
    assert (record.parameters, record.counted) == (431_080, "images")
    assert record.bytes_sent_per_step == record.gradient_bytes == 4 * 431_080  # 2n(p-1)/p with p = 2
    assert [point.epoch for point in record.history] == list(range(1, 13))


def test_the_parts_of_a_step_add_up(trained: Path) -> None:
    record = read_record(trained)
    warm = record.step_seconds[record.warmup_steps :]
    mean_step_s = sum(warm) / len(warm)
    for rank in record.rank_records:
        assert set(rank.parts) == set(PARTS)
        assert min(rank.parts.values()) >= 0
    assert sum(record.rank_records[0].parts.values()) == pytest.approx(mean_step_s, rel=0.02)


def test_records_say_where_each_rank_computed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = read_record(trained)
    for rank in record.rank_records:
        assert set(parse_list(rank.processors)) <= os.sched_getaffinity(0) and rank.processors
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_DISPLAY_AFFINITY", "TRUE")  # a cluster's documentation asks for it
        warn_of_affinity(record)
    lines = capsys.readouterr().err.splitlines()
    threads = f"{record.intra_op_threads} thread{'s' if record.intra_op_threads != 1 else ''} an operation"
    expected = [f"rank {at} on {os.uname().nodename}, {threads}: affinity " for at in range(2)]
    assert [line.startswith(words) for line, words in zip(lines, expected, strict=True)] == [True, True], lines


def test_what_a_run_leaves_behind(trained: Path) -> None:
    assert {path.name for path in trained.iterdir()} == {
        "run.toml", ".hpcdl-data", "record.json", "metrics.jsonl", "model.keras", "ranks", "trace",
    }  # fmt: skip
    assert written_by_ranks(trained) == {"all.json"}
    assert [status.state for status in read_statuses(trained / "ranks")] == ["done"] * 2
    assert 'strategy = "ring"' in (trained / "run.toml").read_text()
    kinds = {json.loads(line)["kind"] for line in (trained / "metrics.jsonl").read_text().splitlines()}
    assert kinds == {"start", "step", "epoch", "message"}


def of_each(*sample: str) -> pytest.MarkDecorator:
    """Parametrize with every strategy; those not in `sample` run in the long version only."""
    return pytest.mark.parametrize(
        "strategy", [name if name in sample else pytest.param(name, marks=pytest.mark.soak) for name in STRATEGIES]
    )


def four_steps(strategy: str, shards: Path, run_dir: Path) -> list[str | Path]:
    """Return the command of a run with four steps."""
    features = STRATEGIES[strategy].features
    ranks = 1 if strategy == "single" else 3 if features.servers else 2
    arguments = [*SHORT, "--strategy", strategy, "--ranks", str(ranks), "--data", shards]
    if features.optimizers:
        arguments += ["--optimizer", features.optimizers[0], "--learning-rate", "0.01"]
    if not features.keras_optimizer or not features.deterministic:
        arguments.remove("--deterministic")
    arguments += [] if features.mpi else ["--allow-grpc"]
    return [*arguments, "--steps", "4", "--run-dir", run_dir]


@of_each()
def test_ranks_that_end_well_leave_one_table(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """Ranks that end well leave one table: on a shared file system a file for each of ten thousand ranks takes minutes.

    It holds workers and servers. `make test-all` checks it for `ps` and `ring` among other tests of such runs.
    """
    finished = session_hpcdl(four_steps(strategy, shards, tmp_path / "run"), timeout_s=300)
    assert finished.code == 0, finished.err
    assert written_by_ranks(tmp_path / "run") == {"all.json"}
    states = [status.state for status in read_statuses(tmp_path / "run" / "ranks")]
    assert states == ["done"] * record_of(tmp_path / "run")["ranks"]


@pytest.mark.long
@of_each("ring")
def test_a_weight_that_no_gradient_reaches_stays_as_it_is_and_is_reported(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """A weight without a gradient stays unchanged and causes a warning; as in Keras's fit, the network still trains."""
    line = [*four_steps(strategy, shards, tmp_path / "run"), "--model", f"{PLANTED}:build_with_idle_weight"]
    finished = session_hpcdl(line, timeout_s=300)
    assert finished.code == 0, finished.err
    reported = "the loss does not depend on aside/idle: no gradient moves that"
    assert any(reported in warning for warning in record_of(tmp_path / "run")["warnings"])
    weights = named_weights_in(tmp_path / "run" / "model.keras")
    (idle,) = [value for name, value in weights.items() if "idle" in name]
    assert idle.tolist() == [1, 1, 1]


@of_each("ring")
def test_a_network_that_no_gradient_reaches_is_refused(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    line = [*four_steps(strategy, shards, tmp_path / "run"), "--model", f"{PLANTED}:build_cut_off"]
    finished = session_hpcdl(line, timeout_s=300)
    assert finished.code == 2, finished.err
    assert "the loss depends on none of the model's trainable variables" in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.long
def test_the_model_loads_where_hpcdl_is_not(trained: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", BLOCKED, trained / "model.keras"],
        capture_output=True, text=True, check=True, cwd="/", env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert answer.stdout.strip() == "(2, 10)"


@pytest.mark.long
def test_evaluate_finds_the_accuracy_that_training_found(
    trained: Path, session_hpcdl: CommandLine, shards: Path
) -> None:
    finished = session_hpcdl(["evaluate", trained, "--data", shards, "--json"])
    assert finished.code == 0, finished.err
    assert finished.err == ""  # TensorFlow's own messages are silenced
    document = finished.json()
    assert (document["split"], document["num_samples"]) == ("val", 359)
    assert document["accuracy"] == record_of(trained)["accuracy"]
    assert document["top5_accuracy"] >= document["accuracy"] and document["warnings"] == []
    of_training = session_hpcdl(["evaluate", trained, "--data", shards, "--split", "train", "--json"])
    said = "the model was trained on train of "
    assert of_training.code == 0 and said in of_training.err and said in of_training.json()["warnings"][0]


@pytest.mark.long
def test_evaluate_knows_classes_by_their_names(trained: Path, session_hpcdl: CommandLine, tmp_path: Path) -> None:
    """evaluate matches classes by name if a data set has only some of them; unknown names are refused."""
    for name in ("3", "5", "8"):
        shutil.copytree(DIGITS / name, tmp_path / "some" / name)
    made = session_hpcdl(["shard", tmp_path / "some", tmp_path / "shards", "--image-size", "28"])
    assert made.code == 0, made.err
    finished = session_hpcdl(["evaluate", trained, "--data", tmp_path / "shards", "--json"])
    assert finished.code == 0, finished.err
    assert "classes have the numbers of" in finished.err and finished.json()["accuracy"] > 0.95
    assert "samples of all have the same inputs as samples that the model was trained on" in finished.err
    (tmp_path / "some" / "8").rename(tmp_path / "some" / "eight")
    made = session_hpcdl(["shard", tmp_path / "some", tmp_path / "others", "--image-size", "28"])
    assert made.code == 0, made.err
    finished = session_hpcdl(["evaluate", trained, "--data", tmp_path / "others"])
    assert finished.code == 2, finished.err
    assert "has classes that the model was not trained on: eight" in finished.err


@pytest.mark.long
@pytest.mark.mpi
def test_a_finished_run_is_not_replaced_by_an_older_checkpoint(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    line = ["train", "--model", "lenet", "--data", shards, "--run-dir", tmp_path / "run"]
    assert session_hpcdl([*line, "--epochs", "2", "--checkpoint-every", "1ms"]).code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    finished = session_hpcdl(["train", "--resume", "--run-dir", tmp_path / "run", "--steps", "3"])
    assert finished.code == 2, finished.out
    assert "beyond the 3 steps that are asked for; give more --epochs or --steps" in finished.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.long
@pytest.mark.mpi
def test_a_checkpoint_is_measured_from_another_folder(session_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "mine" / "shards")
    line = [
        "train",
        "--model",
        "lenet",
        "--data",
        "shards",
        "--steps",
        "2",
        "--run-dir",
        "run",
        "--checkpoint-every",
        "1ms",
    ]
    assert session_hpcdl(line, cwd=tmp_path / "mine").code == 0
    (tmp_path / "mine" / "run" / "model.keras").unlink()
    finished = session_hpcdl(["evaluate", "mine/run", "--data", "mine/shards"], cwd=tmp_path)
    begin = "the run has finished, but has no file model.keras: this is its checkpoint after step 2"
    assert finished.code == 0 and begin in finished.err, finished.err
    assert session_hpcdl(["export", "mine/run", "--to", "keras", "found"], cwd=tmp_path).code == 0  # beside the run
    shutil.rmtree(tmp_path / "mine" / "shards")
    assert session_hpcdl(["export", "mine/run", "--to", "keras", "described"], cwd=tmp_path).code == 0
    (tmp_path / "mine" / "run" / ".hpcdl-data").unlink()  # as in earlier versions
    refused = session_hpcdl(["export", "mine/run", "--to", "keras", "out"], cwd=tmp_path)
    assert refused.code == 2 and "type this in the folder in which the run began" in refused.err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_evaluate_says_that_the_data_of_the_run_is_gone(
    trained: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    settings = moved / "run.toml"
    settings.write_text(settings.read_text().replace(str(shards), str(tmp_path / "gone")))
    made = session_hpcdl(["shard", DIGITS, tmp_path / "small", "--image-size", "28", "--split", "train=0.5,val=0.5"])
    assert made.code == 0, made.err
    evaluate = ["evaluate", moved, "--data", tmp_path / "small"]
    finished = session_hpcdl(evaluate)
    assert finished.code == 0 and "whether samples of val are among them is not known" in finished.err, finished.err
    (moved / ".hpcdl-data").write_text("{")  # damaged, or none as in earlier versions
    finished = session_hpcdl(evaluate)
    assert finished.code == 0, finished.err
    assert "warning: the data that the run was trained on" in finished.err and "may be wrong" in finished.err


@pytest.mark.long
def test_classes_are_matched_by_name_from_any_folder(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    """The run names its data relative to the folder where it began; another folder holds other data of that name."""
    work, other = tmp_path / "work", tmp_path / "other"
    for folder, shades in ((work, {"dark": 0, "light": 255}), (other, {"aaa": 0, "bbb": 255})):
        for name, shade in shades.items():
            (folder / "photos" / name).mkdir(parents=True)
            for number in range(24):
                Image.new("RGB", (32, 32), (shade, shade, number)).save(folder / "photos" / name / f"{number}.png")
        assert session_hpcdl(["shard", "photos", "shards"], cwd=folder).code == 0
    shutil.copytree(work / "photos" / "light", tmp_path / "later" / "light")
    assert session_hpcdl(["shard", "later", "later-shards"], cwd=tmp_path).code == 0
    line = ["train", "--model", "lenet", "--data", "shards", "--epochs", "4", "--lr", "0.05", "--batch-size", "8"]
    assert session_hpcdl([*line, "--run-dir", "runs/a"], cwd=work).code == 0
    for folder in (work, tmp_path, other):
        words = ["evaluate", work / "runs" / "a", "--data", tmp_path / "later-shards", "--json"]
        finished = session_hpcdl(words, cwd=folder)
        assert "classes have the numbers of photos, by their names" in finished.err, finished.err
        assert finished.json()["accuracy"] == 1.0, finished.out
    shutil.rmtree(work / "shards")
    finished = session_hpcdl(words, cwd=other)
    assert "classes have the numbers of photos, by their names" in finished.err, finished.err
    assert finished.json()["accuracy"] == 1.0, "the run describes the data that are gone"


@pytest.mark.long
def test_a_savedmodel_serves(trained: Path, session_hpcdl: CommandLine, tmp_path: Path) -> None:
    finished = session_hpcdl(["export", trained, "--to", "savedmodel", tmp_path / "served"])
    assert finished.code == 0, finished.err
    code = (
        "import sys, tensorflow as tf; model = tf.saved_model.load(sys.argv[1]); "
        "print(model.serve(tf.zeros((3, 28, 28, 1))).shape)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "served"], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "(3, 10)"


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["single", pytest.param("ps", marks=pytest.mark.soak)])
def test_training_on_a_staged_copy_gives_the_same_numbers(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """Training on a staged copy gives the same numbers, also with servers, whose ranks have no data to stage.

    `make test-all` shows it over several nodes in lab/test_shares.py.
    """
    near = tmp_path / "near"
    near.mkdir()
    base = ["train", "--model", "lenet", "--data", shards, "--strategy", strategy, "--steps", "20",
            "--ranks", "1" if strategy == "single" else "3", "--deterministic", "--profile", "none"]  # fmt: skip
    for name, extra in (("far", []), ("near-run", ["--stage", near])):
        finished = session_hpcdl([*base, *extra, "--run-dir", tmp_path / name])
        assert finished.code == 0, finished.err
    same_run(tmp_path / "near-run", tmp_path / "far")
    assert not list(near.iterdir())
