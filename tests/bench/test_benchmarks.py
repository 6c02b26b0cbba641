"""Every program in benchmarks/ runs as committed, with its smallest arguments; test_peers.py covers the peers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT

HOSTS = pytest.mark.lab("hosts")
RANKS = pytest.mark.mpi
LONG = (RANKS, pytest.mark.soak)
OUT_OF_TIME = {"node_winner": 75, "predict_hosts": 75}
"""Exit codes of benchmarks that stop when their time is over."""
SMALLEST = {
    "allreduce_ring": ("--megabytes 1 --repeats 1", (RANKS,)),
    "bucket_size": ("--rounds 1", LONG),
    "beside_loaders": ("--pictures 64 --repeats 1 --folder FOLDER", (pytest.mark.soak,)),
    "data_reading": ("--mib 16 --repeats 1 --folder FOLDER", (pytest.mark.soak,)),
    "data_waiting": ("--steps 2 --hep-steps 1 --batch-size 4 --folder FOLDER", LONG),
    "data_writing": ("--mib 8 --jpegs 20 --repeats 1 --folder FOLDER", ()),
    "early_updates": ("--hosts 2 --model emulated:lenet:0.01 --steps 1", (HOSTS, pytest.mark.soak)),
    "easgd_communication": ("--hosts 3 --mib 0.1 --rounds 1", (HOSTS,)),
    "easgd_pairs": ("--data SHARDS --epochs 1 --minutes 0.01 --out FOLDER/pairs.json", LONG),
    "gpu_check": ("--device cpu", LONG),
    "exchange_hosts": (
        "--model emulated:lenet:0.01 --batch-size 2 --strategies ring --steps 1 --tries 1",
        (HOSTS, pytest.mark.soak),
    ),
    "field_reading": ("--mib 4 --repeats 1 --folder FOLDER", ()),
    "hogwild_bandwidth": ("--workers 2 --mib 0.1 --steps 1", (RANKS,)),
    "jpeg_decoding": ("--jpegs 4 --repeats 1", (pytest.mark.soak,)),
    "memory_rates": ("--mib 1 --repeats 1", ()),
    "node_reads": ("--mib 8 --ranks 2 --folder FOLDER", (pytest.mark.soak,)),
    "observed_cost": ("", ()),
    "predict_hosts": ("--journal FOLDER/points.jsonl --minutes 0.01", (HOSTS, pytest.mark.soak)),
    "optimizer_passes": ("--network lenet --tries 1", (pytest.mark.soak,)),
    "peers_hosts": (
        "--hosts 2 --engines ring --network lenet --seconds 0.01 --tries 1 --steps 1",
        (HOSTS, pytest.mark.soak),
    ),
    "ps_exchange": ("--workers 2 --steps 1", (HOSTS, pytest.mark.soak)),
    "rarely_hosts": (
        "--hosts 2 --cores 0 --rate 1gbit --epochs 1 --target 0.05 --repeats 1 --methods ring --rates 0.05",
        (pytest.mark.lab("slurm"), pytest.mark.soak),
    ),
    "small_exchange": ("--models small --strategies ring --rounds 4", LONG),
    "step_profile": ("--networks lenet --steps 2", (pytest.mark.soak,)),
    "stage_tree": ("--mib 1 --hosts 2", (HOSTS, pytest.mark.soak)),
    "trace_cost": ("--steps 12 --levels steps", LONG),
    "background_work": ("--model lenet --every 1 --rounds 1", LONG),
    "checkpoint_stall": ("--model lenet --repeats 1", LONG),
    "easgd_lenet": ("--hosts 2 --epochs 1 --data SHARDS", (HOSTS, pytest.mark.soak)),
    "exchange_memory": ("--models lenet --steps 1", LONG),
    "fast_kernels": ("--layers --tries 1", (pytest.mark.soak,)),
    "engine_settings": ("remapping --networks lenet --pairs 1 --seconds 0.1", LONG),
    "fit_steps": ("--rounds 1 --steps 2 --batch-size 2 --samples 64", LONG),
    "useful_time": ("--minutes 0.3 --every 9 --model emulated:lenet:0.01", LONG),
    "recovery_in_place": ("--data SHARDS --runs 1", LONG),
    "fit_exposure": ("--model lenet --rounds 1 --steps 1 --batch-size 2", LONG),
    "node_winner": ("--models lenet --rounds 1 --minutes 0.01 --journal FOLDER/samples", LONG),
    "local_copies_cost": ("--model lenet --every 1 --pairs 2", LONG),
    "safety_cost": ("--model lenet --steps 1", LONG),
    "elastic_cost": ("--model lenet --pairs 2", LONG),
    "report_many": ("--runs 40 --repeats 1 --steps 20 --folder FOLDER", (pytest.mark.soak,)),
    "start_up": ("--rounds 1 --ranks 1", LONG),
    "script_overhead": ("--rounds 1 --layers 1 --width 8", LONG),
    "shard_memory": ("--mib 1 --kinds csv --folder FOLDER", (pytest.mark.soak,)),
    "array_writing": ("--mib 4 --repeats 1 --folder FOLDER", LONG),
    "shard_metadata": ("--files 40 --classes 2 --folder FOLDER", (pytest.mark.lab("strace"),)),
    "launch_path": ("", ()),
    "startup_metadata": ("--imports json --folder FOLDER", (pytest.mark.soak,)),
}
PARTS = {"easgd_pairs_ranks", "shaped_hosts", "text_network", "trainer_on_rank"}
"""Files run or imported by other benchmarks."""


HELP = """
import contextlib, io, json, pathlib, runpy, sys
ended = {}
for name in sys.argv[1:]:
    text = pathlib.Path("benchmarks", name + ".py").read_text()
    sys.argv = [name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            if f"python -m benchmarks.{name}" in text:
                runpy.run_module(f"benchmarks.{name}", run_name="__main__")
            else:
                sys.path.insert(0, "benchmarks")
                runpy.run_path(f"benchmarks/{name}.py", run_name="__main__")
            ended[name] = "no end by itself"
        except SystemExit as end:
            ended[name] = said.getvalue() if end.code == 0 else f"exit code {end.code}"
        except Exception as error:
            ended[name] = repr(error)
        finally:
            sys.path[:] = [place for place in sys.path if place != "benchmarks"]
print(json.dumps(ended))
"""
"""Print the help of all long benchmarks in one process, which imports TensorFlow once."""


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark as its docstring says, from the checkout's root; those that import tests/lab run as modules."""
    text = (ROOT / "benchmarks" / f"{name}.py").read_text()
    program = ["-m", f"benchmarks.{name}"] if f"python -m benchmarks.{name}" in text else [f"benchmarks/{name}.py"]
    line = [sys.executable, *program, *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


def test_every_benchmark_is_tried() -> None:
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__"}
    assert names == {*SMALLEST, *PARTS}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, (_, marks) in SMALLEST.items()])
def test_it_runs_with_its_smallest_arguments(name: str, shards: Path, tmp_path: Path) -> None:
    words = SMALLEST[name][0].replace("FOLDER", str(tmp_path)).replace("SHARDS", str(shards)).split()
    finished = run(name, *words)
    assert finished.returncode in {0, OUT_OF_TIME.get(name, 0)}, finished.stdout + finished.stderr
    assert finished.stdout.strip() or (tmp_path / "pairs.json").exists()


@pytest.mark.long
def test_without_a_gpu_it_says_so_in_a_line_and_an_exit_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finished = run("gpu_check")
    assert finished.returncode == 77 and len(finished.stdout.splitlines()) == 1, finished.stderr
    assert finished.stdout.startswith("no GPU: ") and "(exit code 77)" in finished.stdout


LONG_ONES = [name for name, (_, marks) in SMALLEST.items() if pytest.mark.soak in marks]


@pytest.fixture(scope="module")
def helps() -> Mapping[str, str]:
    """The output of --help of each long benchmark."""
    line = [sys.executable, "-c", HELP, *LONG_ONES]
    finished = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=900, check=True)
    found: Mapping[str, str] = json.loads(finished.stdout)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_ONES)
def test_imports_and_arguments_of_the_long_ones_hold(helps: Mapping[str, str], name: str) -> None:
    assert "usage:" in helps[name], helps[name]
