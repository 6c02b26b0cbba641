"""`hpcdl run` on two ranks: a script's arguments, output, exit codes, record; no TensorFlow here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hpcdl.cli.app import app_for
from hpcdl.cluster.batch.submission import Wanted, plan_job
from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec
from tests.conftest import CommandLine, Finished, finish
from tests.scripts.scripts import run_script
from tests.training_runs import record_of, wait_for, written_by_ranks

SCRIPT = """
import sys
import beside
import hpcdl
hpcdl.init(stall_timeout_s=8)
from hpcdl.scripts.process.session import communicator
what, mine = sys.argv[1], hpcdl.rank() == 1
print(hpcdl.rank(), hpcdl.size(), sys.argv[1:], beside.VALUE, "random" in sys.modules, flush=True)
if mine and what == "raise":
    raise ValueError("planted")
if mine and what == "systemexit3":
    raise SystemExit(3)
if what == "mismatch":
    hpcdl.allgather([0.0] * 2) if mine else hpcdl.barrier()
if mine and what.startswith("_exit"):
    import os, multiprocessing
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(5,))
    child.start(), child.join()
    assert child.exitcode == 5
    os._exit(int(what[5:]))
if mine and what.startswith("exit"):
    sys.exit(int(what[4:]))
if mine and what == "interrupt":
    raise KeyboardInterrupt
if not mine or what != "ended":
    communicator().barrier()
if what == "late" and not mine:
    import time; time.sleep(10)  # longer than ranks wait for one that is stuck: this one is not waited for in vain
if what == "usage":
    sys.exit("no such data")
"""

HELPERS = """
import hpcdl
hpcdl.init()
import multiprocessing
def work(_):
    places = hpcdl.rank(), hpcdl.size(), hpcdl.local_rank(), hpcdl.local_size()
    try:
        hpcdl.barrier()
    except Exception as error:
        return f"{places} {error}"
if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(f"{method}: {pool.map(work, [0])[0]}", flush=True)
    hpcdl.barrier()
"""


FORKS = """
import multiprocessing, os, sys, time
say = lambda text: os.write(1, f"{text}\\n".encode())  # one write: lines of two processes stay whole
import hpcdl
hpcdl.init()
if "state" in sys.argv:
    from hpcdl.core.processes.streams import StopRequest
    StopRequest().install()  # as hpcdl.State does
def ended(end):
    child = os.fork()
    if not child:
        end()
    else:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def fails():
    raise ValueError("of a fork")
def exchanges(queue):
    try:
        hpcdl.barrier()
    except Exception as error:
        queue.put(f"{hpcdl.rank()} {error}")
forked = multiprocessing.get_context("fork")
loader = forked.Process(target=time.sleep, args=(60,))
loader.start()
time.sleep(0.3)
loader.terminate()
loader.join(10)
queue = forked.Queue()
other = forked.Process(target=exchanges, args=(queue,))
other.start()
say(f"loader {loader.exitcode}, {queue.get(timeout=20).split(',')[0]}")
if loader.exitcode is None:
    loader.kill()
other.join()
say(f"codes {ended(sys.exit)} {ended(lambda: sys.exit(3))} {ended(fails)}")
hpcdl.barrier()
child = os.fork() if hpcdl.rank() == 0 else None
if child == 0:
    say("a fork at its end")
else:
    if child:
        os.waitpid(child, 0)
    hpcdl.barrier()
    say(f"rank {hpcdl.rank()} at its end")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("script")
    (place / "beside.py").write_text("VALUE = 41")
    (place / "script.py").write_text(SCRIPT)
    return place


def run(hpcdl: CommandLine, cwd: Path, *words: str | Path) -> Finished:
    return hpcdl(["run", "--ranks", "2", "--stall-timeout", "8s", *words], cwd=cwd)


@pytest.mark.mpi
def test_a_script_gets_its_words_its_folder_and_a_record_that_a_report_reads(
    session_hpcdl: CommandLine, folder: Path, tmp_path: Path
) -> None:
    words = ["--prefix", "--run-dir", tmp_path / "run", folder / "script.py", "late", "--ranks", "7", "--help"]
    finished = run(session_hpcdl, tmp_path, *words)
    assert finished.code == 0, finished.err
    reported = "['late', '--ranks', '7', '--help'] 41"
    assert {line.split(" 41")[0] + " 41" for line in finished.out.splitlines()} == {
        f"[{rank}] {rank} 2 {reported}" for rank in range(2)
    }
    record = record_of(tmp_path / "run")
    assert (record["status"], record["model"], record["ranks"]) == ("finished", "script", 2)
    assert record["strategy"] == "script", "nothing of it exchanges gradients"
    assert record["batch_per_rank"] is None and record["images_per_second"] is None
    report = session_hpcdl(["report", tmp_path / "run", "--out", tmp_path / "report", "--format", "json"])
    assert report.code == 0, report.err
    assert json.loads((tmp_path / "report" / "report.json").read_text())["warnings"]
    assert written_by_ranks(tmp_path / "run") == {
        "all.json", *(f"rank-{rank}.{process_end}" for rank in range(2) for process_end in ("out", "err")),
    }  # fmt: skip
    again = run(session_hpcdl, tmp_path, "--run-dir", tmp_path / "run", folder / "script.py", "x")
    assert again.code == 2 and "exists" in again.err
    other = session_hpcdl(["evaluate", tmp_path / "run", "--data", "synthetic:mnist"])
    assert other.code == 2 and "is a run of the script" in other.err


def test_a_notebook_is_refused_with_what_makes_a_script_of_it(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "lesson.ipynb").write_text('{"cells": []}')
    refused = session_hpcdl(["run", tmp_path / "lesson.ipynb"])
    assert refused.code == 2 and f"jupyter nbconvert --to script {tmp_path / 'lesson.ipynb'}" in refused.err


PIECES = """
import time
import hpcdl
hpcdl.init()
for piece in ("one ", f"line of {hpcdl.rank()}", " and more\\n") * 50:
    print(piece, end="", flush=True)
    time.sleep(0.01)
print("the last, without an end", end="")
import os, subprocess
subprocess.run(["echo", "a child"], check=True)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_may_change_its_working_directory(
    session_hpcdl: CommandLine, tmp_path: Path, ranks: int, fails: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    text = "import os, hpcdl; hpcdl.init(); hpcdl.barrier(); os.chdir('elsewhere')"
    (tmp_path / "moves.py").write_text(text + "; raise ValueError('planted')" * fails)
    words = ["run", "--ranks", str(ranks), "--run-dir", "run", "moves.py"]
    finished = session_hpcdl(words, cwd=tmp_path)
    assert finished.code == fails and ("ValueError: planted" in finished.err) == fails, finished.err
    assert record_of(tmp_path / "run")["status"] == ("failed" if fails else "finished")
    assert "warning" not in finished.err and not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.mpi
def test_sets_have_one_order_on_all_ranks(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    """Classes numbered in the order of a set would have other numbers on each rank, and in each run."""
    names = {f"class {number}" for number in range(20)}
    (tmp_path / "classes.py").write_text(f"import hpcdl\nhpcdl.init()\nhpcdl.barrier()\nprint(list({names}))\n")
    lines = [run(session_hpcdl, tmp_path, "--run-dir", folder, "classes.py").out.splitlines() for folder in "ab"]
    orders = [line for run_lines in lines for line in run_lines if line.startswith("['class")]
    assert len(orders) == 4 and len({*orders}) == 1


@pytest.mark.mpi
def test_a_flag_of_hpcdl_behind_the_script_is_named(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text("import hpcdl\nhpcdl.init()\nhpcdl.rank()\n")
    (tmp_path / "own.py").write_text("import hpcdl, sys\nhpcdl.init()\nassert '--run_dir' in sys.argv\n")
    late = session_hpcdl(["run", "deaf.py", "--ranks", "2", "--seeds", "1"], cwd=tmp_path)
    reported = (
        "warning: --ranks follows deaf.py, so it is the script's, whose text does not name it; for hpcdl, type it"
    )
    assert late.code == 0 and reported in late.err and "finished on 1 rank;" in late.err, late.err
    assert late.err.count("warning") == 1, late.err
    own = session_hpcdl(["run", "own.py", "--run_dir", "x", "--run-dir", "x"], cwd=tmp_path)
    assert own.code == 0 and "warning" not in own.err, own.err


def test_a_script_for_horovod_is_referred_to_the_list_of_changes(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "old one.py").write_text("import horovod.keras as hvd\nhvd.init()\n")
    ended = session_hpcdl(["run", "old one.py"], cwd=tmp_path)
    assert ended.code != 0 and "next: hpcdl run --from-horovod 'old one.py' --check" in ended.err, ended.err
    assert "import hpcdl as hvd" in session_hpcdl(["run", "--from-horovod", "old one.py", "--check"], cwd=tmp_path).out


def test_a_script_that_asks_its_user_is_referred_to_arguments(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text("epochs = input('epochs? ')")
    finished = session_hpcdl(["run", "--ranks", "2", tmp_path / "asks.py"], cwd=tmp_path)
    (line,) = [line for line in finished.err.splitlines() if line.startswith("hpcdl: ")]
    assert finished.code == 1 and "no standard input; give values as arguments" in line


def test_a_script_that_reads_its_input_to_the_end_does_not_wait(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text("import sys\nprint('read', repr(sys.stdin.read()))\n")
    finished = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "reads.py"])
    assert finished.code == 0 and finished.out.count("read ''") == 2


WRITES = """
import hpcdl, json, pathlib, shutil, tempfile
hpcdl.init()
tempfile.NamedTemporaryFile().close()
json.dump({}, open("history.json", "w"))
pathlib.Path(f"own{hpcdl.rank()}.txt").write_text("fine")
pathlib.Path("gone.txt").write_text("of another name later"); hpcdl.barrier()
if hpcdl.rank() == 0: pathlib.Path("gone.txt").unlink(); pathlib.Path("one.txt").write_text("fine")
for name in ("results.csv", "training.log", f"own{hpcdl.rank()}.csv"):
    with open(name, "a") as file: file.write("0.5 ")
temporary = pathlib.Path(f"temporary{hpcdl.rank()}"); temporary.write_text("one rank's")
temporary.replace("renamed.txt")
if hpcdl.rank() == 0: pathlib.Path("out").mkdir(); pathlib.Path("out/config.json").write_text("{}")
pathlib.Path("parts").mkdir(exist_ok=True); pathlib.Path(f"parts/{hpcdl.rank()}").write_text("of a while")
hpcdl.barrier()
if hpcdl.rank() == 0: shutil.rmtree("parts")
else: shutil.rmtree("out"); pathlib.Path("out").mkdir()
hpcdl.barrier()
"""


@pytest.mark.mpi
def test_a_part_of_a_package_is_run_by_the_file_that_the_refusal_names(
    session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "words.py").write_text("text = 'came from the package'")
    (package / "train.py").write_text("from .words import text\nif __name__ == '__main__':\n    print(text)")
    asked = session_hpcdl(["run", "--ranks", "1", "-m", "package.train"])
    assert asked.code == 2 and "run_module('PACKAGE.MODULE', run_name='__main__')` into one beside" in asked.err
    refused = session_hpcdl(["run", "--ranks", "1", "--run-dir", tmp_path / "one", package / "train.py"])
    assert refused.code == 1
    (tmp_path / "main.py").write_text(refused.err.splitlines()[-1].split("`")[1])
    ended = session_hpcdl(["run", "--ranks", "1", "--run-dir", tmp_path / "two", tmp_path / "main.py"])
    assert (ended.code, ended.out) == (0, "came from the package\n")


def test_a_file_that_all_ranks_write_is_named(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(WRITES)
    finished = run(session_hpcdl, tmp_path, "--run-dir", tmp_path / "run", tmp_path / "writes.py")
    written, appended, removed = [line for line in finished.err.splitlines() if "warning" in line]
    assert finished.code == 0 and "ranks 0, 1 each wrote history.json, renamed.txt: what one wrote" in written
    assert "ranks 0, 1 each appended to results.csv: it has what each wrote" in appended
    assert "rank 1 removed out, where rank 0 had written config.json: prepare" in removed
    assert any("history.json" in one for one in json.loads((tmp_path / "run/record.json").read_text())["warnings"])


WRITES_OTHERWISE = """
import hpcdl
hpcdl.init()
import h5py, keras, tensorflow as tf
hpcdl.DistributedOptimizer("sgd")
rank = hpcdl.rank()
for turn in range(2):
    hpcdl.barrier()
    if turn == rank:
        for name in ("all.h5", f"own{rank}.h5"):
            with h5py.File(name, "w") as file: file["x"] = [rank]
        with h5py.File("all.h5") as file: assert file["x"][0] == rank
        tf.io.TFRecordWriter("all.tfrecord").close()
        tf.io.write_file("all.txt", "1")
        with tf.io.gfile.GFile("all.txt") as file: assert file.read() == "1"
        with tf.io.gfile.GFile("all.csv", "w") as file: file.write("1")
for folder in ("curves", f"own{rank}"): tf.summary.create_file_writer(folder).close()
"""


@pytest.mark.long
def test_files_of_hdf5_and_tensorflow_that_all_ranks_write_are_named(
    session_hpcdl: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "writes.py").write_text(WRITES_OTHERWISE)
    finished = run(session_hpcdl, tmp_path, "--run-dir", tmp_path / "run", tmp_path / "writes.py")
    written, appended = [line for line in finished.err.splitlines() if "warning: ranks 0, 1 each" in line]
    assert "wrote all.csv, all.h5 and 2 more: what" in written and "appended to curves: it" in appended


DOWNLOADS = """
import pathlib, time, zipfile
import hpcdl
import keras
from keras.src.utils import file_utils
def slowly(origin, target, hook):
    print("downloads")
    with zipfile.ZipFile("made.zip", "w") as made: made.writestr("one.txt", "1"); made.writestr("two.txt", "2")
    content = pathlib.Path("made.zip").read_bytes()
    with open(target, "wb") as file:
        file.write(content[:50]); file.flush(); time.sleep(1); file.write(content[50:])
file_utils.urlretrieve = slowly
for of in (keras.utils.get_file, file_utils.get_file):
    folder = of("data.zip", "https://example.org/data.zip", extract=True, cache_dir="downloads")
    assert len(list(pathlib.Path(folder).iterdir())) == 2
hpcdl.init()
for _ in range(2):
    hpcdl.barrier()
    path = of("data.zip", "https://example.org/data.zip", cache_dir="downloads", force_download=True)
    assert zipfile.is_zipfile(path)
"""


@pytest.mark.long
def test_one_rank_downloads_what_all_ask_for(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()  # Keras takes /tmp/.keras for a cache that is not there
    (tmp_path / "script.py").write_text(DOWNLOADS)
    finished = run(session_hpcdl, tmp_path, "--run-dir", tmp_path / "run", tmp_path / "script.py")
    assert (finished.code, finished.out.count("downloads")) == (0, 3), finished.err
    assert "warning" not in finished.err


@pytest.mark.mpi
def test_an_import_of_horovod_names_the_check(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("import horovod.tensorflow.keras as hvd")
    finished = run(session_hpcdl, tmp_path, tmp_path / "old.py")
    (line,) = [line for line in finished.err.splitlines() if line.startswith("hpcdl: rank")]
    assert finished.code == 1 and f"hpcdl run --from-horovod {tmp_path / 'old.py'} --check lists the lines" in line


@pytest.mark.mpi
def test_the_ranks_of_a_node_share_files_and_lines_stay_whole(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "pieces.py").write_text(PIECES)
    finished = run(session_hpcdl, tmp_path, "--run-dir", tmp_path / "run", tmp_path / "pieces.py")
    assert finished.code == 0, finished.err
    lines = finished.out.replace("an endthe", "an end\nthe").split("\n")
    reported = {f"one line of {rank} and more": 50 for rank in range(2)} | {"the last, without an end": 2, "a child": 2}
    assert {line: lines.count(line) for line in reported} == reported
    host = socket.gethostname()
    assert written_by_ranks(tmp_path / "run") == {"all.json", f"node-{host}.out", f"node-{host}.err"}


LONG = """
import time
from pathlib import Path
import hpcdl
hpcdl.init()
while not Path("enough").exists():
    with Path(f"seen-{hpcdl.rank()}").open("a") as file:
        file.write(".")
    time.sleep(0.05)
"""
AS_A_SHELL = """
import os, subprocess, sys
os.setsid()  # the default action of SIGTSTP needs a parent in the same session and another group
command = subprocess.Popen([sys.executable, "-m", "hpcdl", *sys.argv[1:]], process_group=0)
print(command.pid, flush=True)
sys.exit(command.wait())
"""


@pytest.mark.mpi
def test_ctrl_z_suspends_the_command_and_says_that_the_ranks_continue(
    session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "long.py").write_text(LONG)
    seen = tmp_path / "seen-1"
    shell = subprocess.Popen(
        [sys.executable, "-c", AS_A_SHELL, "run", "--ranks", "2", "long.py"],
        cwd=tmp_path, env=session_hpcdl.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    wait_for(seen.exists)
    os.kill(pid, signal.SIGTSTP)
    wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    size = seen.stat().st_size
    wait_for(lambda: seen.stat().st_size > size)
    os.kill(pid, signal.SIGCONT)
    (tmp_path / "enough").touch()
    finished = finish(shell)
    assert finished.code == 0, finished.err
    line = "hpcdl: suspended, but the ranks continue: `fg` shows them again, and Ctrl-C then ends them"
    assert finished.err.splitlines()[0] == line


ENDS = [
    ("raise", 1, "rank 1 on HOST: ValueError: planted"),
    ("exit3", 3, "rank 1 on HOST: the script has called sys.exit(3), which ends all ranks"),
    ("systemexit3", 3, "rank 1 on HOST: the script has called sys.exit(3), which ends all ranks"),
    ("mismatch", 2, "the ranks are not in the same collective"),
    ("usage", 1, "the script has called sys.exit(1), which ends all ranks"),
    ("exit0", 1, "rank 1 on HOST has left: its script has called sys.exit(0) before any update, while rank 0 (script)"),
    ("_exit3", 3, "rank 1 on HOST: the script has called os._exit(3), which ends all ranks"),
    (
        "_exit0",
        1,
        "rank 1 on HOST has left: its script has called os._exit(0) before any update, while rank 0 (script)",
    ),
    ("ended", 1, "rank 1 on HOST has left: its script has come to its end before any update, while rank 0 (script)"),
]
"""What a script does, on rank 1 or on both, the exit code, and the last line of stderr."""


def ends(*sample: str) -> list[Any]:
    """Return ENDS; those not in `sample` run in the long version only."""
    return [pytest.param(*end, marks=() if end[0] in sample else pytest.mark.soak, id=end[0]) for end in ENDS]


@pytest.mark.mpi
@pytest.mark.parametrize(("what", "code", "last"), ends("raise", "_exit3", "_exit0"))
def test_started_by_mpiexec_every_end_has_its_code_and_one_line_soon(
    session_hpcdl: CommandLine, folder: Path, what: str, code: int, last: str
) -> None:
    script = (folder / "script.py").read_text().replace("stall_timeout_s=8", "stall_timeout_s=600")
    (folder / "patient.py").write_text(script)
    finished = run_script(session_hpcdl, folder / "patient.py", what, ranks=2, cwd=folder, timeout_s=120)
    assert finished.code == code, finished.err
    (line,) = [line for line in finished.err.splitlines() if line.startswith("hpcdl: ")]
    assert all(part in line for part in last.split("HOST"))
    assert finished.err.count("Traceback") == (what == "raise")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("what", "code", "last"),
    [
        *ends("raise", "exit3", "mismatch", "usage", "exit0", "ended"),
        pytest.param("interrupt", 130, "rank 1 on HOST: KeyboardInterrupt", id="interrupt"),
    ],
)
def test_every_end_has_its_code_and_one_line(
    session_hpcdl: CommandLine, folder: Path, tmp_path: Path, what: str, code: int, last: str
) -> None:
    finished = run(session_hpcdl, tmp_path, "--run-dir", tmp_path / "run", folder / "script.py", what)
    assert finished.code == code, finished.err
    (line,) = [line for line in finished.err.splitlines() if line.startswith("hpcdl: ")]
    assert all(part in line for part in last.split("HOST"))
    assert "Abort(" not in finished.err, "a launcher's or a library's chatter goes into the log"
    assert ("Traceback" in finished.err) == (what in ("raise", "interrupt"))
    assert ("supervised" in finished.err) is False, "a traceback begins in the script"


@pytest.mark.mpi
def test_processes_that_a_script_starts_import_it_and_are_no_ranks(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    """Child processes that import the script are no ranks: MPI would fail to start again, and a pool retry forever."""
    (tmp_path / "script.py").write_text(HELPERS)
    finished = session_hpcdl(["run", "--ranks", "2", tmp_path / "script.py"], cwd=tmp_path)
    assert finished.code == 0, finished.err
    for method in ("spawn", "forkserver"):
        for rank in range(2):
            assert f"{method}: ({rank}, 2, {rank}, 2) this process is no rank" in finished.out


@pytest.mark.mpi
@pytest.mark.parametrize(
    "words", [["-m", "hpcdl", "run", "script.py", "plain"], ["script.py", "plain"], ["script.py", "state"]]
)
def test_what_a_rank_forks_ends_as_python_ends_it_and_leaves_the_ranks_alone(
    session_hpcdl: CommandLine, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "script.py").write_text(FORKS)
    finished = under_mpiexec(session_hpcdl, tmp_path, words)
    assert finished.returncode == 0, finished.stderr
    reported = sorted(finished.stdout.splitlines())
    assert [line for line in reported if not line.startswith("runs/")] == [
        "a fork at its end",
        *["codes 0 3 1"] * 2,
        *[f"loader -15, {rank} this process is no rank" for rank in range(2)],
        *[f"rank {rank} at its end" for rank in range(2)],
    ]
    assert "Abort" not in finished.stderr and "Interrupted" not in finished.stderr
    assert finished.stderr.count("ValueError: of a fork") == 2


@pytest.mark.parametrize(("name", "content"), [("missing.py", None), ("text.py", "dear sir"), ("bytes.py", "\0")])
def test_what_is_no_script_is_refused_before_anything_starts(
    session_hpcdl: CommandLine, tmp_path: Path, name: str, content: str | None
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    finished = session_hpcdl(["run", "--ranks", "2", tmp_path / name], cwd=tmp_path)
    assert finished.code == 2
    assert len(finished.err.splitlines()) == 1 and name in finished.err
    assert not (tmp_path / "runs").exists()


def under_mpiexec(hpcdl: CommandLine, folder: Path, words: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run Python with `words` on two ranks, started by mpiexec alone."""
    mpiexec = find_mpiexec()
    return subprocess.run(
        [mpiexec.path, "-n", "2", sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=120,
        env=hpcdl.environment | dict(environment_for(mpiexec.flavour)),
    )  # fmt: skip


def test_a_flag_that_nothing_uses_is_refused_before_anything_starts(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(7)")
    line = ["run", "--ranks", "2", "--run-dir", tmp_path / "run", "--mtbf", "10h", tmp_path / "script.py"]
    refused = session_hpcdl(line)
    assert refused.code == 2 and "--mtbf: --checkpoint-every 600.0 does not use it" in refused.err
    assert not (tmp_path / "run").exists()


def test_a_script_from_stdin_is_refused_since_ranks_have_none(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(1)")
    with (tmp_path / "script.py").open() as given:
        finished = subprocess.run(
            [sys.executable, "-m", "hpcdl", "run", "--ranks", "2", "/dev/stdin"], cwd=tmp_path, stdin=given,
            capture_output=True, text=True, timeout=60, env=session_hpcdl.environment,
        )  # fmt: skip
    assert finished.returncode == 2 and "put the script into a file" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1 and not (tmp_path / "runs").exists()


@pytest.mark.mpi
def test_a_launcher_of_its_own_starts_it_too(session_hpcdl: CommandLine, folder: Path, tmp_path: Path) -> None:
    words = ["-m", "hpcdl", "run", "--run-dir", tmp_path / "run", folder / "script.py", "plain"]
    finished = under_mpiexec(session_hpcdl, tmp_path, words)
    assert finished.returncode == 0, finished.stderr
    assert record_of(tmp_path / "run")["status"] == "finished"


def test_a_job_keeps_the_scripts_words_apart_from_its_own() -> None:
    command = ["run", "--prefix", "--profile", "none", "train.py", "--ranks", "7", "--resume"]
    request, run_dir = plan_job(Wanted(command=command, nodes=2, ranks_per_node=2, until_done=True), now=0.0)
    own, _, of_script = " ".join(request.command).partition(" train.py ")
    assert own == f"run --prefix --profile none --ranks 4 --run-dir {run_dir} --resume"
    assert of_script == "--ranks 7 --resume"
    assert run_dir is not None and run_dir.name.endswith("-train-script")


@pytest.mark.parametrize("flag", ["-n4", "--trace", "--trace full", "--ranks 4", "--no-resume", "--time-limit=9s"])
def test_a_job_finds_the_script_behind_a_flag(flag: str) -> None:
    request, _ = plan_job(Wanted(command=["run", *flag.split(), "train.py", "--own"], nodes=4), now=0.0)
    words = list(request.command)
    assert words[-2:] == ["train.py", "--own"] and words.count("4") + words.count("-n4") == 1


def test_a_job_knows_each_flag_of_run_without_a_value() -> None:
    """Else it takes the script for the value, and the job's number of ranks for words of the script."""
    parser: Any = typer.main.get_command(app_for(["run"]))
    options = parser.get_command(None, "run").params
    switches = [name for option in options if getattr(option, "is_flag", False) for name in option.opts]
    assert len(switches) > 10
    for switch in switches:
        request, _ = plan_job(Wanted(command=["run", switch, "train.py"], nodes=2), now=0.0)
        assert request.command[-1] == "train.py", switch
