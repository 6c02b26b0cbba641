"""User input is checked before anything is written: one line, exit 2 (3 for damage), no traceback."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest

from tests.conftest import DIGITS, CommandLine

BASE = ["train", "--model", "lenet", "--strategy", "ring"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--data", "nowhere"], 2, "nowhere"),
        (["--strategy", "rign"], 2, "unknown strategy 'rign'; did you mean 'ring'?"),
        (["--strategy", "horovod"], 2, "unknown strategy 'horovod'; did you mean 'ring'?"),
        (["--strategy", "MultiWorkerMirroredStrategy"], 2, "did you mean 'ring'?"),
        (["--strategy", "ParameterServerStrategy"], 2, "did you mean 'ps'?"),
        (["--model", "lennet"], 2, "did you mean 'lenet'?"),
        (["--ranks", "0"], 2, "--ranks: 0 is out of range; it must be at least 1"),
        (["--ranks", "two"], 2, "--ranks: 'two' is not a whole number"),
        (["--ranks", "2000"], 2, "use fewer ranks or a smaller batch"),
        (["--strategy", "single", "--ranks", "2"], 2, "use --ranks 1, or --strategy ring"),
        (["--epochs", "1", "--steps", "1"], 2, "exclude each other"),
        (["--config", "missing.toml"], 2, "no such config file"),
        (["--set", "epohcs=1"], 2, "did you mean 'epochs'?"),
        (["--resume"], 2, "add --run-dir DIR"),
        (["--resume", "--run-dir", ""], 2, "--run-dir is empty (a variable that is not set?)"),
        (["--run-dir="], 2, "--run-dir is empty (a variable that is not set?)"),
        (["--run-dir", "é" * 200], 2, "a name of more than 255 bytes"),
        (["--run-dir", f"{__file__}/run"], 2, "a file is in its way; choose another --run-dir"),
        (["--run-dir", "/sys/run"], 2, "cannot write run directory /sys/run"),  # where root cannot write either
        (["--data", ""], 2, "the data folder's name is empty"),
        (["--servers", "1"], 2, "strategy 'ring' has no servers"),
        (["--init-weights", "/dev/zero"], 2, "it is a device, not a file"),
        (["--init-weights", "gone.keras"], 2, "No such file"),
        (["--init-weights", __file__], 2, "not a saved model"),
        (["--init-weights", "."], 2, "a folder; give a .keras file, as model.keras of a run"),
        (["--learning-rate", "nan"], 2, "not a finite number"),
        (["--loss", "crossentropy"], 2, "unknown loss 'crossentropy'; did you mean 'cross-entropy'?"),
        (["--loss", "mse", "--metrics", "mean_error"], 2, "unknown metric 'mean_error'; did you mean"),
        (["--metrics", "accuracy"], 2, "cross-entropy counts top-1 and top-5 itself"),
        (["--loss", "mse", "--label-smoothing", "0.1"], 2, "--label-smoothing goes with --loss cross-entropy"),
        (["--time-limit", "soon"], 2, "write for example 90s"),
    ],
)
def test_one_line_and_nothing_written(
    ask_hpcdl: CommandLine, shards: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    data = [] if "--data" in arguments else ["--data", str(shards)]
    pairs = zip(BASE[1::2], BASE[2::2], strict=True)
    base = [word for flag, value in pairs if flag not in arguments for word in (flag, value)]
    finished = ask_hpcdl([BASE[0], *base, *data, *arguments], cwd=tmp_path)
    assert finished.code == code, finished.err
    assert words in finished.err
    assert len(finished.err.strip().splitlines()) == 1
    assert "Traceback" not in finished.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_data_set_is_no_run_directory_and_a_file_may_lack_functions(
    ask_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    finished = ask_hpcdl([*BASE, "--data", shards, "--run-dir", shards])
    assert finished.err == f"hpcdl: run directory {shards} holds a data set; choose another --run-dir\n"
    (tmp_path / "net.py").write_text("import keras\n")
    finished = ask_hpcdl(["train", "--model", "net.py:build", "--data", shards], cwd=tmp_path)
    assert "function in net.py: 'build'; it has no function outside classes; write this one there" in finished.err


@pytest.mark.parametrize(
    "command", ["runs", "report", "inspect", "checkpoints", "watch", "run", f"shard {DIGITS}", "examples digits --to"]
)
def test_a_name_that_no_file_can_have(ask_hpcdl: CommandLine, tmp_path: Path, command: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    finished = ask_hpcdl([*command.split(), "x" * 300], cwd=tmp_path)
    assert finished.code == 2 and "is too long a name; give a shorter one" in finished.err, finished.err
    assert len(finished.err.strip().splitlines()) == 1 and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("train --ranks 1 --data gone -n 2", ["--ranks 1 is ignored, because -n 2 follows"]),
        ("train --data gone --resume --no-resume", ["--resume is ignored, because --no-resume follows"]),
        ("train --data=gone --data gone --set seed=1 --set steps=2 --set seed=3",
         ["--set seed=1 is ignored, because --set seed=3 follows"]),
        ("predict --import csv a --import csv 'b c'",
         ["--import csv a is ignored, because --import csv 'b c' follows"]),
        ("node show --machine a --machine gone", ["--machine a is ignored, because --machine gone follows"]),
        ("sweep --model lenet --strategy ring --strategy gone --workers 1 --workers 2",
         ["--workers 1 is ignored, because --workers 2 follows"]),
        ("run --ranks 1 gone.py --ranks 2 --ranks 3", []),
        ("train --data gone --json --json --quiet -q", []),
    ],
)  # fmt: skip
def test_what_a_later_word_overrides_is_reported(ask_hpcdl: CommandLine, line: str, reported: list[str]) -> None:
    finished = ask_hpcdl(shlex.split(line))
    assert finished.code == 2, finished.err
    messages = [words.removeprefix("warning: ") for words in finished.err.splitlines() if words.startswith("warning: ")]
    assert len(messages) == len(reported) and all(map(str.startswith, messages, reported)), finished.err


@pytest.mark.parametrize("command", ["report", "runs", "trace", "shard", "export --to keras"])
def test_an_empty_name_is_not_this_folder(ask_hpcdl: CommandLine, tmp_path: Path, command: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    finished = ask_hpcdl([*command.split(), "", "target"], cwd=tmp_path)
    assert finished.code == 2 and "is empty (a variable that is not set?)" in finished.err, finished.err
    assert sorted(tmp_path.rglob("*")) == before


def test_all_that_is_not_there_is_reported_at_once(ask_hpcdl: CommandLine) -> None:
    line = ["train", "--strategy", "rign", "--model", "lennet", "--data", "nowhere", "--preprocess", "gone.py:map"]
    finished = ask_hpcdl(line)
    reported = finished.err.splitlines()
    assert finished.code == 2 and len(reported) == 4, finished.err
    for words, messages in zip(("'rign'", "'lennet'", "gone.py", "nowhere"), reported, strict=True):
        assert words in messages


def test_pictures_that_the_network_does_not_take_are_reported_before_a_job_waits_for_them(
    ask_hpcdl: CommandLine, tmp_path: Path
) -> None:
    made = ask_hpcdl(["shard", DIGITS, tmp_path / "small"], cwd=tmp_path)
    advised = made.err.splitlines()[-1].partition(", or ")[2]
    assert made.code == 0 and advised.startswith("hpcdl train --model cifar10-quick --data"), made.err
    assert ask_hpcdl([*shlex.split(advised)[1:], "--dry-run"], cwd=tmp_path).code == 0
    finished = ask_hpcdl([*BASE, "--data", tmp_path / "small", "--dry-run"], cwd=tmp_path)
    assert finished.code == 2 and "lenet cannot take images of 8x8; the smallest it takes is 16x16" in finished.err
    warned = ask_hpcdl(["submit", "--dry-run", "--", *BASE, "--data", tmp_path / "small"], cwd=tmp_path)
    assert "the job would be refused: lenet cannot take images of 8x8" in warned.err


@pytest.mark.parametrize("command", ["evaluate gone --data synthetic:mnist@40", "export gone x", "train --resume"])
def test_no_run_is_a_mistake_and_no_damage(ask_hpcdl: CommandLine, command: str) -> None:
    line = [*command.split(), *(["--run-dir", "gone"] if "--resume" in command else [])]
    finished = ask_hpcdl(line)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err == "hpcdl: gone holds no run of `hpcdl train`; `hpcdl runs` lists what there is\n"


def test_an_unknown_key_in_a_config_file(ask_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('data = "x"\nbatchsize = 3\n')
    finished = ask_hpcdl([*BASE, "--data", shards, "--config", config])
    assert finished.code == 2
    assert "unknown key 'batchsize'; here it is batch-size" in finished.err


def test_a_run_directory_that_exists_is_left_alone(ask_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    finished = ask_hpcdl([*BASE, "--data", shards, "--run-dir", taken])
    assert finished.code == 2
    assert "choose another --run-dir" in finished.err
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]


def test_a_shard_cut_in_half_is_damage(ask_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(shards, tmp_path / "copy")
    shard = next(copy.rglob("*.h5"))
    os.truncate(shard, shard.stat().st_size // 2)
    finished = ask_hpcdl([*BASE, "--data", copy, "--run-dir", tmp_path / "run"])
    assert finished.code == 3, finished.err
    assert shard.name in finished.err
    assert "Traceback" not in finished.err
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
def test_what_only_the_ranks_can_tell_leaves_nothing_behind(
    run_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(
        "import keras\n\n\ndef build(num_classes, input_shape):\n"
        "    layers = [keras.Input(input_shape), keras.layers.Flatten()]\n"
        "    return keras.Sequential([*layers, keras.layers.Dense(num_classes, activation='softmax')])\n"
    )
    finished = run_hpcdl(["train", "--model", "net.py:build", "--data", shards, "--strategy", "ps", "--ranks", "2",
                          "--run-dir", "run"], cwd=tmp_path)  # fmt: skip
    assert finished.code == 2, finished.err
    reported, refused = finished.err.splitlines()
    assert reported.startswith("the model is fed images ") and "leave the softmax out" in refused
    assert not (tmp_path / "run").exists()


def test_one_rank_for_a_job_of_several_nodes_is_reported_where_nobody_asked_for_it(
    ask_hpcdl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    env = {"HPCDL_HOSTFILE": str(tmp_path / "hosts")}
    reported = "one rank on one of this job's 2 nodes; --ranks 2 starts one on each"
    line = ["train", "--model", "lenet", "--data", "nowhere"]
    assert reported in ask_hpcdl(line, env=env).err
    assert reported not in ask_hpcdl([*line, "--ranks", "1"], env=env).err
    assert reported not in ask_hpcdl(line).err
