"""`make peers`: its plan, its arguments, the tables that it writes, and a short run of real ranks."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import environment, tables
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.models.table import MODELS
from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks" / "peers"
FOREIGN = (
    "horovod_rank", "horovod_steps", "horovod_waits", "networks", "pytorch_networks", "pytorch_rank", "pytorch_steps",
    "pytorch_waits", "steps", "waits",
)  # fmt: skip
HEAD = tables.Head(
    machine="made-up processor, 2 cores", versions="hpcdl 0", command="python -m benchmarks.peers", date="2026-01-02",
    priority="real-time priority",
)  # fmt: skip


def tried(engine: str, number: int = 1, *, step: float = 0.0, compute: float = 0.0, **more: object) -> tables.Try:
    given = {"network": "lenet", "batch_size": 16, "steps": 10, "load": 2.0, **more}
    return tables.Try(engine=engine, number=number, step_seconds=step, compute_seconds=compute, **given)  # type: ignore[arg-type]


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def run(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks.peers", *words]
    settings = {**os.environ, **({"PATH": path} if path else {})}
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, env=settings)


def test_a_row_has_median_and_extremes_of_the_tries() -> None:
    tries = [
        tried("auto", number, step=0.010 + exposed, compute=0.010)
        for number, exposed in ((1, 1e-3), (2, 3e-3), (3, 2e-3))
    ]
    text = tables.section(HEAD, peers.LABELS, tries)
    assert cells(text, "lenet, 16 | hpcdl `auto`")[2:] == [
        "12.0 (11.0..13.0)", "", "2.00 (1.00..3.00)", "",
    ]  # fmt: skip
    assert "made-up processor" in text and "real-time priority" in text and "python -m benchmarks.peers" in text
    assert text.index("whole step, ms") < text.index("exposed, ms")


def test_each_row_says_who_is_ahead_by_ratios_of_the_same_try() -> None:
    tries = [
        tried("auto", 1, step=0.012, compute=0.010),
        tried("auto", 2, step=0.016, compute=0.010),
        tried("horovod", 1, step=0.012, compute=0.008),
        tried("horovod", 2, step=0.020, compute=0.016),
        tried("pytorch-ddp", 1, step=0.010, compute=0.009),
        tried("pytorch-ddp", 2, step=0.010, compute=0.009),
        tried("mpi-loop", 1, step=0.020, compute=0.010, raw_seconds=0.002, sliced_seconds=0.001),
        tried("mpi-loop", 2, step=0.020, compute=0.010, raw_seconds=0.002, sliced_seconds=0.003),
    ]
    text = tables.section(HEAD, peers.LABELS, tries)
    assert cells(text, "lenet, 16 | Horovod")[2:] == [
        "16.0 (12.0..20.0)", "hpcdl: 0.90 (0.80..1.00)", "4.00 (4.00..4.00)", "Horovod: 1.00 (0.50..1.50)",
    ]  # fmt: skip
    assert cells(text, "lenet, 16 | PyTorch DDP")[3:] == [
        "PyTorch DDP: 1.40 (1.20..1.60)", "1.00 (1.00..1.00)", "PyTorch DDP: 4.00 (2.00..6.00)",
    ]  # fmt: skip
    assert cells(text, "lenet | ")[1:] == [
        "PyTorch DDP: 10.0 (`auto`: 14.0)", "PyTorch DDP: 1.00 (`auto`: 4.00)", "1.50 (1.00..2.00)",
        "2.50 (2.00..3.00)",
    ]  # fmt: skip


def test_a_peer_that_fails_is_a_row_that_says_so() -> None:
    tries = [
        tried("horovod", 1, error="exit code 1: no | such library"),
        tried("horovod", 2, error="exit code 1: no | such library"),
        tried("auto", 1, step=0.012, compute=0.010),
        tried("auto", 2, error="not over after 900 s"),
    ]
    text = tables.section(HEAD, peers.LABELS, tries)
    assert cells(text, "lenet, 16 | Horovod")[1:] == [
        "Horovod (0 of 2 tries; failed: exit code 1: no / such library)", "did not run", "", "", ""
    ]  # fmt: skip
    assert cells(text, "lenet, 16 | hpcdl")[1:] == [
        "hpcdl `auto` (1 of 2 tries; failed: not over after 900 s)", "12.0", "", "2.00", ""
    ]  # fmt: skip
    assert "limit, ms" not in text
    text = tables.section(HEAD, peers.LABELS, [*tries, tried("mpi-loop", 1, error="no MPI")])
    assert cells(text, "lenet | ") == ["lenet", "hpcdl `auto`: 12.0", "hpcdl `auto`: 2.00", "not measured", ""]


def test_no_ratio_to_an_exchange_that_is_lost_in_noise() -> None:
    tries = [tried("auto", step=0.012, compute=0.010), tried("horovod", step=0.009, compute=0.010)]
    row = cells(tables.section(HEAD, peers.LABELS, tries), "lenet, 16 | Horovod")
    assert row[2:] == ["9.00", "Horovod: 1.33", "-1.00", ""]
    tries = [tried("auto", step=0.009, compute=0.010), tried("horovod", step=0.012, compute=0.010)]
    assert cells(tables.section(HEAD, peers.LABELS, tries), "lenet, 16 | Horovod")[2:] == [
        "12.0", "hpcdl: 0.75", "2.00", "",
    ]  # fmt: skip


def test_tables_stand_between_the_markers_and_nothing_else_moves(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    for _ in range(2):
        tables.put("new", page)
        assert page.read_text() == f"before\n{tables.BEGIN}\nnew\n{tables.END}\nafter\n"
    page.write_text("no markers\n")
    with pytest.raises(UsageError, match="has no lines"):
        tables.put("new", page)


def test_the_page_of_numbers_has_the_markers_once() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert page.count(tables.BEGIN) == page.count(tables.END) == 1 and page.index(tables.BEGIN) < page.index(tables.END)


def test_the_plan_takes_engines_in_turn() -> None:
    planned = peers.plan(["lenet", "alexnet"], ["auto", "horovod"], 2)
    assert [(one.number, one.network, one.engine) for one in planned] == [
        (number, network, engine)
        for number in (1, 2) for network in ("lenet", "alexnet") for engine in ("auto", "horovod")
    ]  # fmt: skip
    assert {(one.batch_size, one.steps) for one in planned} == {peers.NETWORKS["lenet"], peers.NETWORKS["alexnet"]}
    assert {one.steps for one in peers.plan(["lenet"], ["auto"], 1, 3)} == {3}


def test_one_rank_is_compared_without_an_exchange() -> None:
    assert peers.arguments(["--ranks", "1"]).engines == list(peers.ALONE)
    with pytest.raises(UsageError, match="unknown engine 'ring'"):
        peers.arguments(["--ranks", "1", "--engines", "ring"])
    alone = [dataclasses.replace(one, ranks=1) for one in (tried("auto", step=0.01), tried("horovod", step=0.02))]
    text = tables.section(HEAD, peers.LABELS, [*alone, dataclasses.replace(tried("pytorch-ddp", error="no"), ranks=1)])
    assert cells(text, "lenet, 16 | Horovod") == ["lenet, 16", "Horovod", "20.0", "hpcdl: 0.50"]
    assert cells(text, "lenet, 16 | hpcdl `single`")[2:] == ["10.0", ""]
    assert cells(text, "lenet, 16 | PyTorch")[2:] == ["did not run", ""]
    assert "One rank with all cores" in text and "xposed" not in text and "`single` over" in text


def test_horovod_is_started_by_the_mpi_that_it_is_built_with() -> None:
    own = str(Path(sys.executable).parent)
    assert peers.without_own(os.pathsep.join([own, "/usr/bin", own, "/bin"])) == "/usr/bin:/bin"


def test_every_network_of_the_plan_is_one_of_hpcdls_or_has_a_file() -> None:
    assert set(peers.NETWORKS) - set(MODELS) == set(peers.OWN_NETWORKS)
    from hpcdl.models.load import load_model

    for network in peers.OWN_NETWORKS:
        weights = load_model(peers.model_of(network)).trainable_variables
        assert sum(one.shape.num_elements() for one in weights) == peers.num_parameters(network)


@pytest.mark.parametrize("name", ["networks", "pytorch_networks"])
def test_the_peers_know_every_network(name: str) -> None:
    (table,) = [
        node.value
        for node in ast.parse((FOLDER / f"{name}.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NETWORKS"
    ]
    assert isinstance(table, ast.Dict)
    assert {one.value for one in table.keys if isinstance(one, ast.Constant)} == set(peers.NETWORKS)


@pytest.mark.parametrize(
    "words, reported",
    [
        ("--networks lenett", "did you mean"),
        ("--engines horovot", "did you mean"),
        ("--tries 0", "--tries and --steps are 1 or more"),
        ("--tries five", "invalid int value"),
        ("--steps -1", "--tries and --steps are 1 or more"),
        ("--out no-such-page.md", "no-such-page.md is not a file"),
        ("--tables no-such-journal", "no journal of tries"),
        ("--priority high", "invalid choice"),
        ("--colour", "unrecognized arguments"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_2(words: str, reported: str) -> None:
    with pytest.raises(UsageError) as caught:
        peers.main(words.split())
    assert reported in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_command_itself_ends_like_that() -> None:
    finished = run("--networks", "lenett")
    assert finished.returncode == 2 and finished.stdout == ""
    assert len(finished.stderr.splitlines()) == 1 and finished.stderr.startswith("hpcdl: unknown network 'lenett'")


def test_a_machine_without_compilers_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"g\+\+, make, cmake, mpicxx, mpiexec; on Debian 12: .*--engines"):
        environment.with_horovod(tmp_path / "environment", {"PATH": str(tmp_path)})
    assert not (tmp_path / "environment").exists()


def test_packages_that_cannot_be_had_are_reported_in_one_line(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in (environment.PYTHON, *environment.COMPILERS):
        (programs / name).write_text('#!/bin/sh\necho "some more" >&2; echo "ERROR: no route" >&2; exit 1\n')
        (programs / name).chmod(0o755)
    with pytest.raises(HpcdlError, match="ERROR: no route; or leave Horovod out") as caught:
        environment.with_horovod(tmp_path / "environment", {"PATH": f"{programs}:/usr/bin:/bin"})
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    with pytest.raises(HpcdlError, match="ERROR: no route; or leave PyTorch out") as caught:
        environment.with_pytorch(tmp_path / "environment", {"PATH": f"{programs}:/usr/bin:/bin"})
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)


def test_engines_that_are_left_out_instead_are_all_the_others() -> None:
    for reported, left_out in ((environment.WITHOUT_HOROVOD, "horovod"), (environment.WITHOUT_PYTORCH, "pytorch-ddp")):
        assert sorted([*reported.rpartition(" ")[2].split(","), left_out]) == sorted(peers.LABELS)


def test_a_machine_without_that_python_is_reported_before_pytorch_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not on PATH; or leave PyTorch out: --engines"):
        environment.with_pytorch(tmp_path / "environment", {"PATH": str(tmp_path)})
    assert not (tmp_path / "environment").exists()


def test_an_engine_that_fails_or_says_nothing_useful_is_an_error_of_its_try() -> None:
    (planned,) = peers.plan(["lenet"], ["horovod"], 1)

    def errors(script: str) -> str:
        return peers.measure(planned, ([sys.executable, "-c", script], {}), ()).error

    assert errors("import sys; sys.exit('no MPI here')") == "exit code 1: no MPI here"
    assert "no result" in errors("print('hello')")
    assert "another network: 7 parameters, not 431,080" in errors(
        'print(\'{"step_seconds": 1, "compute_seconds": 1, "parameters": 7}\')'
    )
    assert "no step of 2 ranks" in errors('print(\'{"step_seconds": 1, "compute_seconds": 1, "ranks": 1}\')')
    assert "no step of 2 ranks" in errors("print('{\"loss\": 1}')")
    (alone,) = peers.plan(["lenet"], ["auto"], 1, num_ranks=1)
    found = 'print(\'{"step_seconds": 1, "compute_seconds": null, "ranks": 1}\')'
    assert peers.measure(alone, ([sys.executable, "-c", found], {}), ()).error == ""
    assert errors('print(\'a word\\n{"step_seconds": 2, "compute_seconds": 1, "parameters": 431080}\')') == ""


def test_tables_are_made_again_from_a_journal_that_was_cut_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, page = tmp_path / "tries.jsonl", tmp_path / "page.md"
    records = [HEAD, tried("auto", step=0.012, compute=0.010)]
    journal.write_text("".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in records) + '{"network": "le')
    page.write_text(f"{tables.BEGIN}\n{tables.END}\n")
    peers.main(["--tables", str(journal), "--out", str(page)])
    assert (
        capsys.readouterr().out.strip() in page.read_text() and "| lenet, 16 | hpcdl `auto` | 12.0 " in page.read_text()
    )
    journal.write_text(json.dumps(dataclasses.asdict(HEAD)))
    with pytest.raises(UsageError, match="holds no try"):
        peers.main(["--tables", str(journal)])


def test_make_peers_is_a_target() -> None:
    finished = subprocess.run(
        ["make", "-n", "peers", "PEERS_ARGS=--tries 1"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0 and "-m benchmarks.peers --tries 1" in finished.stdout, finished.stderr
    assert "--out docs/performance.md" in subprocess.run(
        ["make", "-n", "peers"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_it_is_python_that_autograph_takes(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert calls and not [call.lineno for call in calls if call.func.id == "zip" and call.keywords]  # type: ignore[attr-defined]


@pytest.mark.mpi
@pytest.mark.soak
def test_a_short_run_of_real_ranks(tmp_path: Path) -> None:
    journal = tmp_path / "tries.jsonl"
    finished = run(
        "--networks", "lenet", "--engines", "auto,mpi-loop", "--tries", "1", "--steps", "2", "--priority", "normal",
        "--journal", str(journal),
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    _, tries = peers.kept(journal)
    assert [(one.engine, one.error) for one in tries] == [("auto", ""), ("mpi-loop", "")]
    assert all(one.step_seconds > 0 for one in tries) and tries[1].limit_seconds > 0
    assert len(cells(finished.stdout, "lenet, 16 | MPI loop by hand")) == 6


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.lab("compilers")
def test_every_engine_runs_every_network(tmp_path: Path) -> None:
    journal = tmp_path / "tries.jsonl"
    finished = run("--tries", "1", "--steps", "1", "--priority", "normal", "--journal", str(journal))
    assert finished.returncode == 0, finished.stderr
    _, tries = peers.kept(journal)
    assert len(tries) == len(peers.LABELS) * len(peers.NETWORKS) and not [one.error for one in tries if one.error]
