"""`hpcdl report` as users type it: files, exit codes, a one-line message for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.report.synthetic import make_record, weak_study, write_run


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weak_study(tmp_path_factory.mktemp("studies") / "study")


def test_a_study_becomes_all_files(ask_hpcdl: CommandLine, study: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = ask_hpcdl(["report", study, "--out", out, "--figures"])
    assert finished.code == 0, finished.err
    assert {path.name for path in out.iterdir()} == {
        "report.html",
        "report.md",
        "report.json",
        "scaling.csv",
        ".hpcdl-report.json",
        "tables",
        "figures",
    }
    assert {path.suffix for path in (out / "figures").iterdir()} == {".svg", ".png", ".pdf"}
    *_, page, accuracy = finished.out.splitlines()
    assert page == f"report: {out / 'report.html'}"
    assert accuracy == "held-out accuracy: 88.00 % (lenet, ring, 1 worker, median of 3 runs)"
    document = json.loads((out / "report.json").read_text())
    assert [row["efficiency"]["mean"] for row in document["scaling"]] == pytest.approx([1.0, 0.9, 0.81])
    assert len(document["summary"]) == 6
    assert document["warnings"] == []
    laws = {item["law"] for item in document["fits"]}
    assert {"gustafson", "usl"} <= laws <= {"gustafson", "usl", "alpha-beta"}, "a line through noise is left out"


def test_json_is_one_document_on_stdout(ask_hpcdl: CommandLine, study: Path, tmp_path: Path) -> None:
    finished = ask_hpcdl(["report", study, "--out", tmp_path / "out", "--format", "json,terminal", "--json"])
    assert finished.code == 0
    assert finished.json() == json.loads((tmp_path / "out" / "report.json").read_text())
    assert "held-out accuracy" in finished.err


def test_terminal_alone_writes_nothing(ask_hpcdl: CommandLine, study: Path, tmp_path: Path) -> None:
    finished = ask_hpcdl(["report", study, "--format", "terminal", "--out", tmp_path / "out"])
    assert finished.code == 0
    assert not (tmp_path / "out").exists()
    assert "Weak scaling" in finished.out


def test_one_run_without_an_out_is_reported_beside_it(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_record())
    finished = ask_hpcdl(["report", run, "--format", "html"])
    assert finished.code == 0
    assert (run / "report" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "no runs named"),
        (["absent"], 2, "absent is absent"),
        (["empty"], 2, "holds no record.json"),
        (["study", "--format", "pdf"], 2, "unknown format 'pdf'"),
        (["study", "--import", "json", "x.json"], 2, "only csv"),
        (["--import", "csv", "absent.csv"], 2, "no such file"),
        (["study", "--fail-on-regression", "5"], 2, "needs --baseline"),
        (["study", "--link", "fast"], 2, "--link"),
        (["study", "--out", "file"], 2, "is a file"),
        (["study", "--baseline", "absent"], 2, "absent is absent"),
        (["damaged"], 3, "is not valid JSON"),
        (["future"], 3, "schema 'hpcdl.run/9'"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    ask_hpcdl: CommandLine, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    here = tmp_path / "here"
    write_run(here / "study" / "run", make_record())
    for name, text in (("damaged", '{"schema": "hpcdl.run/1", '), ("future", '{"schema": "hpcdl.run/9"}')):
        (here / name).mkdir()
        (here / name / "record.json").write_text(text)
    (here / "empty").mkdir()
    (here / "file").write_text("")
    before = sorted(here.rglob("*"))
    finished = ask_hpcdl(["report", *arguments], cwd=here)
    assert finished.code == code, finished.err
    assert words in finished.err
    assert len(finished.err.splitlines()) == 1
    assert finished.out == ""
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("command", ["report", "report --for own", "predict"])
@pytest.mark.parametrize("out", ["shards", "shards/train"])
def test_no_output_goes_into_a_data_set(ask_hpcdl: CommandLine, tmp_path: Path, command: str, out: str) -> None:
    weak_study(tmp_path / "study")
    (tmp_path / "shards" / "train").mkdir(parents=True)
    (tmp_path / "shards" / "train" / "shard-00000.h5").touch()
    (tmp_path / "shards" / "manifest.json").touch()
    finished = ask_hpcdl([*command.split(), "study", "--out", out], cwd=tmp_path)
    assert (finished.code, finished.err) == (2, f"hpcdl: --out {out} holds a data set; name another folder\n")
    assert len([*(tmp_path / "shards").rglob("*")]) == 3


def test_files_beside_a_report_are_said(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    weak_study(tmp_path / "study")
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "thesis.tex").touch()
    (tmp_path / "paper" / "tables").mkdir()
    (tmp_path / "paper" / "tables" / "shard-00000.h5").touch()  # a data set below is none here
    note = "note: {} holds other files, which stay as they are: thesis.tex\n"
    for command in ("report --format html,md,csv", "predict", "report --format html,md,csv"):
        finished = ask_hpcdl([*command.split(), "study", "--out", "paper"], cwd=tmp_path)
        assert finished.code == 0 and note.format("paper") in finished.err, finished.err
        alone = ask_hpcdl([*command.split(), "study", "--out", "new"], cwd=tmp_path)
        assert alone.code == 0 and "note: " not in alone.err, alone.err


@pytest.mark.parametrize(
    "words",
    [
        ["report", "--link", "fast"],
        ["report", "--baseline", "absent"],
        ["predict", "--strategy", "rings"],
        ["predict", "--network", "fast"],
        ["predict", "--machine", "nowhere"],
    ],
)
def test_a_mistake_is_found_before_anything_is_said_of_the_runs(
    ask_hpcdl: CommandLine, tmp_path: Path, words: list[str]
) -> None:
    for run in weak_study(tmp_path / "study").iterdir():
        (run / "trace").mkdir()
    (tmp_path / "study" / "damaged").mkdir()
    (tmp_path / "study" / "damaged" / "record.json").write_text("{")
    finished = ask_hpcdl([words[0], "study", *words[1:]], cwd=tmp_path)
    assert finished.code == 2 and len(finished.err.splitlines()) == 1, finished.err


def test_a_damaged_record_among_others_is_reported_and_left_out(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    folder = weak_study(tmp_path / "study")
    (folder / "w1-r0" / "record.json").write_text("{")
    finished = ask_hpcdl(["report", folder, "--out", tmp_path / "out", "--format", "json", "--json"])
    assert finished.code == 0
    document = finished.json()
    assert any("could not be read" in line for line in document["warnings"])
    assert document["scaling"][0]["n"] == 2


@pytest.mark.parametrize("how", ["125MB", "file"])
def test_the_link_is_given_or_measured(ask_hpcdl: CommandLine, study: Path, tmp_path: Path, how: str) -> None:
    measured = tmp_path / "bench.json"
    measured.write_text(json.dumps({"link": {"latency_s": 1e-5, "seconds_per_byte": 8e-9}}))
    link = measured if how == "file" else how
    finished = ask_hpcdl(["report", study, "--link", link, "--format", "terminal"])
    assert finished.code == 0, finished.err
    assert "119 MiB" in finished.out, "125 MB/s, whichever way it came"
    measured.write_text('{"rows": []}')
    if how == "file":
        refused = ask_hpcdl(["report", study, "--link", link, "--format", "terminal"])
        assert refused.code == 2 and "bench allreduce --json" in refused.err and refused.out == ""


def test_imported_rows_stand_beside_own_runs(ask_hpcdl: CommandLine, study: Path, tmp_path: Path) -> None:
    table = tmp_path / "old.csv"
    lines = [f"weak,horovod,lenet,{n},{n},32,{r},{90 * n + r}" for n in (1, 2) for r in range(3)]
    table.write_text("mode,strategy,model,nodes,ranks,batch_per_rank,repeat,images_per_second\n" + "\n".join(lines))
    finished = ask_hpcdl(
        ["report", study, "--import", "csv", table, "--out", tmp_path / "out", "--format", "json", "--json"]
    )
    assert finished.code == 0
    rows = finished.json()["scaling"]
    assert {row["strategy"] for row in rows} == {"ring", "horovod"}
    assert next(row for row in rows if row["strategy"] == "horovod")["servers"] == 0
    assert any("mixed machines" in line for line in finished.json()["warnings"])


def test_a_baseline_that_was_faster_fails_the_command(ask_hpcdl: CommandLine, study: Path, tmp_path: Path) -> None:
    slower = tmp_path / "slower"
    for workers in (1, 2, 4):
        for repeat, noise in enumerate((0.99, 1.0, 1.01)):
            rate = 85 * workers * 0.9 ** (workers.bit_length() - 1) * noise
            write_run(slower / f"{workers}-{repeat}", make_record(workers, rate, software={"hpcdl": "2"}))
    arguments: list[str | Path] = ["report", slower, "--baseline", study, "--out", tmp_path / "out", "--json"]
    finished = ask_hpcdl([*arguments, "--fail-on-regression", "10"])
    assert finished.code == 1
    assert "3 settings are more than 10 % slower" in finished.err
    assert (tmp_path / "out" / "report.html").is_file()
    found = [item for item in finished.json()["verdicts"] if item["kind"] == "baseline"]
    assert [item["decided"] for item in found] == [True] * 3
    assert ask_hpcdl([*arguments, "--format", "json", "--fail-on-regression", "20"]).code == 0


@pytest.mark.long
def test_the_same_study_is_no_regression(ask_hpcdl: CommandLine, study: Path, tmp_path: Path) -> None:
    finished = ask_hpcdl(
        ["report", study, "--baseline", study, "--fail-on-regression", "0", "--out", tmp_path / "out", "--format", "md"]
    )
    assert finished.code == 0
    assert "0 became faster and 0 slower" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "changes, why",
    [
        ({"model": "alexnet"}, "no setting has usable runs on both sides"),
        ({"status": "failed"}, "no setting has usable runs on both sides"),
        ({}, "measured once on one of them; repeat the runs"),
    ],
)
def test_a_baseline_that_judges_nothing_is_no_check_that_was_passed(
    ask_hpcdl: CommandLine, study: Path, tmp_path: Path, changes: dict[str, str], why: str
) -> None:
    write_run(tmp_path / "now" / "r1", make_record(1, 10.0, **changes))
    arguments = ["report", tmp_path / "now", "--baseline", study, "--out", tmp_path / "out", "--format", "md"]
    finished = ask_hpcdl([*arguments, "--fail-on-regression", "5"])
    assert finished.code == 2 and "--fail-on-regression judged nothing: " in finished.err and why in finished.err
    assert (tmp_path / "out" / "report.md").is_file() and ask_hpcdl(arguments).code == 0


COUNTED = """
import cProfile, json, pathlib, pstats, re, sys
from hpcdl.cli.main import run
profile = cProfile.Profile()
code = profile.runcall(run, sys.argv[2:]) if sys.argv[1] == "calls" else run(sys.argv[2:])
peak = re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())
calls = pstats.Stats(profile).total_calls if sys.argv[1] == "calls" else 0
print(json.dumps({"calls": calls, "peak_kib": int(peak[1])}), file=sys.stderr)
sys.exit(code)
"""
"""The command line, with its costs measured: `wait4` would include the parent's peak memory from before `exec`."""


def many_records(folder: Path, first: int, last: int) -> Path:
    for number in range(first, last):
        workers = 2 ** (number % 6)
        changes = {
            "strategy": ("ring", "ps", "tree")[number % 3],
            "model": ("lenet", "alexnet", "resnet50")[number // 3 % 3],
            "batch_per_rank": (16, 32, 64)[number // 9 % 3],
        }
        record = make_record(workers, 100.0 * workers * (1 + number % 7 / 100), **changes)
        (folder / f"r{number:05d}").mkdir(parents=True)
        (folder / f"r{number:05d}" / "record.json").write_text(json.dumps(asdict(record)))
    return folder


def costs(run_hpcdl: CommandLine, way: str, *arguments: str | Path) -> dict[str, float]:
    command = [sys.executable, "-c", COUNTED, way, *map(str, arguments)]
    finished = subprocess.run(command, env=run_hpcdl.environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    found: dict[str, float] = json.loads(finished.stderr.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.parametrize("command, most_calls", [("report", 1100), ("runs", 420)])
def test_what_a_record_costs(ask_hpcdl: CommandLine, tmp_path: Path, command: str, most_calls: int) -> None:
    """The cost per record is bounded, counted in function calls, which a busy machine does not change."""
    options = ("--out", tmp_path / "out", "--format", "json") if command == "report" else ()
    before, after = (
        costs(ask_hpcdl, "calls", command, tmp_path / "many", *options)
        for last in (108, 216)
        if many_records(tmp_path / "many", last - 108, last)
    )
    assert (after["calls"] - before["calls"]) / 108 < most_calls


@pytest.mark.soak
def test_ten_thousand_records_fit_into_a_gigabyte(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    """10,000 records fit into 1 GB of memory; benchmarks/report_many.py measures the seconds."""
    folder = many_records(tmp_path / "many", 0, 10_000)
    cost = costs(run_hpcdl, "time", "report", folder, "--out", tmp_path / "out")
    assert "10,000 runs" in (tmp_path / "out" / "report.md").read_text()
    assert cost["peak_kib"] < 1_000_000
    assert costs(run_hpcdl, "time", "runs", folder)["peak_kib"] < 1_000_000


def test_numbers_that_are_none_do_not_stop_the_report(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    """NaN and Infinity, which Python writes into JSON, do not stop the report."""
    folder = weak_study(tmp_path / "study")
    path = folder / "w2-r1" / "record.json"
    text = path.read_text().replace('"imbalance_seconds": ', '"imbalance_seconds": NaN, "was": ')
    path.write_text(
        text.replace('"loss": 2.0', '"loss": NaN').replace('"seconds_total": ', '"seconds_total": Infinity, "x": ')
    )
    finished = ask_hpcdl(["report", folder, "--out", tmp_path / "out", "--json"])
    assert finished.code == 0, finished.err
    assert finished.json()["scaling"][1]["n"] == 3
