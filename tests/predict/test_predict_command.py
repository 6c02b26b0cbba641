"""`hpcdl predict` as users type it: the document, the table, and one line for a question without answer."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from hpcdl.models.table import MODELS
from hpcdl.predict.answer import Question, answer
from hpcdl.predict.jobs import lengths_of
from hpcdl.report.analysis.analyse import analyse
from hpcdl.report.runs.run import SlowWorker
from hpcdl.report.runs.sources import Gathered
from tests.conftest import CommandLine
from tests.predict.clusters import SEED, make_cluster, true_step, write_study
from tests.report.synthetic import make_record, make_run, write_run


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("predict") / "study", counted="samples")


def test_the_document_is_what_is_agreed(ask_hpcdl: CommandLine, study: Path) -> None:
    line = ["predict", study, "--nodes", "8,16", "--strategy", "ring,ps,sync-easgd", "--target", "85%", "--json"]
    finished = ask_hpcdl(line)
    assert finished.code == 0, finished.err
    document = json.loads(finished.out)
    assert {"predictions", "backtest", "crossings", "next_run"} <= set(document)
    assert len(document["predictions"]) == 6
    for row in document["predictions"]:
        assert {"strategy", "model", "nodes", "workers", "servers", "batch_per_rank", "limited_by"} <= set(row)
        for key in (
            "step_seconds",
            "images_per_second",
            "efficiency",
            "epoch_seconds",
            "epoch_node_hours",
            "target_seconds",
        ):
            assert 0 < row[key]["low"] <= row[key]["mean"] <= row[key]["high"], key
        rate = row["workers"] * row["batch_per_rank"] / row["step_seconds"]["mean"]
        assert row["images_per_second"]["mean"] == pytest.approx(rate)
    ring = [row for row in document["predictions"] if row["strategy"] == "ring"]
    cluster = make_cluster(SEED)
    for row in ring:
        true = sum(true_step(cluster, "ring", row["workers"], 5).values())
        assert row["step_seconds"]["mean"] == pytest.approx(true, rel=0.15)
    assert {(row["strategy"], row["workers"]) for row in document["backtest"]} == {("ring", 4), ("ps", 4)}
    assert all(row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1) for row in document["backtest"])
    assert document["next_run"]["command"].startswith("hpcdl ")
    assert {row["what"] for row in document["crossings"]} == {"efficiency below 80 %", "best strategy"}


def test_a_table_without_parts_of_a_step_tells_no_limit(ask_hpcdl: CommandLine, tmp_path: Path, study: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        "strategy,model,nodes,ranks,batch_per_rank,images_per_second\n"
        "ring,lenet,1,1,64,50\nring,lenet,2,2,64,98\nring,lenet,4,4,64,191\n"
    )
    said = "no run has the parts of a step: what limits a step"
    assert said in " ".join(ask_hpcdl(["predict", "--import", "csv", table, "--nodes", "8"]).out.split())
    assert said not in " ".join(ask_hpcdl(["predict", study, "--nodes", "8"]).out.split())


def test_one_strategy_alone_is_not_called_the_best(ask_hpcdl: CommandLine, study: Path) -> None:
    alone = ask_hpcdl(["predict", study, "--strategy", "ring", "--nodes", "8"])
    assert alone.code == 0 and "best" not in alone.out and "an epoch, node-hours, and what" in alone.out, alone.out
    two = ask_hpcdl(["predict", study, "--strategy", "ring,ps", "--nodes", "8"])
    assert two.code == 0 and "best from 8 nodes" in two.out and "the best of them" in two.out, two.out


def test_the_table_fits_a_terminal(ask_hpcdl: CommandLine, study: Path, tmp_path: Path) -> None:
    finished = ask_hpcdl(["predict", study, "--nodes", "1,8,512", "--out", tmp_path / "out"])
    assert finished.code == 0, finished.err
    assert max(map(len, finished.out.splitlines())) <= 80, max(finished.out.splitlines(), key=len)
    assert "next: hpcdl " in finished.err and "held out: ring on 4 workers" in finished.out
    assert "beyond 16 x the largest size" in finished.out
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".svg", ".json"}
    (drawn,) = (tmp_path / "out").glob("*-throughput.svg")
    assert "samples/s" in drawn.read_text() and "images/s" not in drawn.read_text()


def test_what_intervals_do_not_distinguish_is_not_called_best(ask_hpcdl: CommandLine, study: Path) -> None:
    """Efficiencies and the best number of servers have intervals; other strategies' exceed 100 % of a named base."""
    line = ["predict", study, "--nodes", "8,64", "--strategy", "ring,ps"]
    shown = ask_hpcdl(line).out
    assert re.search(r"^ring +8 .* \d+-\d+ % ", shown, re.MULTILINE), shown
    assert "effic. is a 90 % interval of a worker's throughput against " in shown
    choice = ask_hpcdl([*line, "--json"]).json()["best_servers"][-1]
    assert choice["low"] < choice["images_per_second"] < choice["high"]
    others = ", ".join(map(str, choice["not_distinguishable"]))
    assert choice["servers"] not in choice["not_distinguishable"]
    assert (f"  not distinguishable from it: {others}\n" in shown) is bool(others)
    rank = "perhaps best" if others else "best"
    assert f"{rank} on 64 nodes for ps: {choice['servers']} servers, placement {choice['placement']}\n" in shown


def test_a_best_number_of_servers_is_perhaps_best_and_placed_only_where_there_is_a_choice() -> None:
    from hpcdl.cli.study.predict import _server_line
    from hpcdl.predict.answer import ServerChoice

    sure = ServerChoice(strategy="easgd", model="lenet", nodes=4, servers=2, placement="", images_per_second=9.0,
                        low=8.0, high=10.0, not_distinguishable=())  # fmt: skip
    assert _server_line(sure) == "best on 4 nodes for easgd: 2 servers"
    unsure = _server_line(dataclasses.replace(sure, placement="split", not_distinguishable=(1, 4)))
    assert (
        unsure == "perhaps best on 4 nodes for easgd: 2 servers, placement split\n  not distinguishable from it: 1, 4"
    )


@pytest.mark.parametrize("strategy", ["ring", "ps", "sync-easgd", "grpc-ps"])
def test_the_next_run_that_it_advises_is_accepted(
    ask_hpcdl: CommandLine, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The next run that predict advises is accepted by --dry-run, word by word; on one node as a batch job."""
    monkeypatch.chdir(tmp_path)
    line = ["predict", study, "--nodes", "8,64", "--strategy", strategy, "--json"]
    command = shlex.split(ask_hpcdl(line).json()["next_run"]["command"])
    assert command[0] == "hpcdl"
    words = command[1:] if command[1] == "submit" else ["submit", "--", *command[1:]]
    finished = ask_hpcdl([words[0], "--dry-run", *words[1:]])
    assert finished.code == 0, finished.err
    assert "train --model" in finished.out and f"--strategy {strategy}" in finished.out


@pytest.mark.parametrize("strategy", ["easgd", "async-easgd"])
def test_runs_with_a_center_are_predicted_within_reason(strategy: str) -> None:
    """Runs with a center are predicted sensibly: `easgd`'s workers wait for their turn, not for the slowest."""
    parts = {"input": 0.0, "compute": 0.08, "wait": 0.01, "exposed_communication": 0.005, "update": 0.005, "other": 0.0}
    runs = [
        make_run(n, n * 320 * scatter, strategy=strategy, servers=1, nodes=1, ranks_per_node=n + 1, parts=parts)
        for n in (1, 2)
        for scatter in (0.99, 1.01)
    ]
    found = answer(Question(nodes=(1,), strategies=(strategy,)), runs)
    assert all(abs(item.error) < 0.1 for held in found.held_out.values() for item in held)
    assert all(0.05 < item.step_seconds.low < item.step_seconds.high < 0.2 for item in found.predictions)


def test_repeats_that_scatter_are_no_miss_of_the_models() -> None:
    rates = {1: (320, 322), 2: (300, 620)}
    runs = [make_run(n, rate, nodes=1, ranks_per_node=n) for n, own in rates.items() for rate in own]
    (held,) = answer(Question(nodes=(1,), strategies=("ring",)), runs).held_out["lenet"]
    assert held.covered and abs(held.deviations) < 2


def test_what_few_runs_cannot_show_is_reported() -> None:
    """Doubts are reported: a possible jump beyond the measured sizes, an outlier, an edited record."""
    rates = {1: (320, 322, 100), 2: (600, 602, 604)}
    runs = [
        make_run(n, rate, name=f"run-{n}-{rate}", step_seconds=n * 32 / (3 * rate if rate == 602 else rate))
        for n, own in rates.items()
        for rate in own
    ]
    reported = answer(Question(nodes=(2, 16), strategies=("ring",)), runs).warnings
    assert any("no jump beyond 2 nodes" in line and "a run on 4 nodes would show it" in line for line in reported)
    assert any(line.startswith("run-1-100 counts, though its 100 a second are far off the 320") for line in reported)
    (edited,) = [line for line in reported if "contradict themselves" in line]
    assert "run-2-602 (602 images/s, 1,806 by its steps of 64)" in edited and "run-2-600" not in edited
    (caveat,) = [line for line in analyse(Gathered(runs=runs)).warnings if "contradict" in line]
    assert caveat.startswith("1 record contradicts itself, kept in every mean") and "run-2-602" in caveat
    slow = SlowWorker(rank=1, host="node1", beyond_s=0.1, factor=2.4)
    odd = [dataclasses.replace(run, first_and_last_steps=(0.1, 0.2), slowest=slow) for run in runs[:1]]
    reported = answer(Question(nodes=(2,), strategies=("ring",)), [*odd, *runs[1:]]).warnings
    assert "steps changed their speed during 1 run; the mean counts: run-1-320 100 ms to 200 ms" in reported
    assert any(
        "one worker computed 1.5 times" in line and "run-1-320 rank 1 on node1 2.4 x" in line for line in reported
    )
    crowded = [dataclasses.replace(run, nodes=1, cores_per_node=1) for run in runs]
    reported = answer(Question(nodes=(1,), strategies=("ring",)), crowded).warnings
    assert any(line.startswith("workers shared processors") and "run-2-600" in line for line in reported)
    enough = [dataclasses.replace(run, nodes=1, cores_per_node=2) for run in runs]
    assert not any("shared" in line for line in answer(Question(nodes=(1,), strategies=("ring",)), enough).warnings)


@pytest.mark.parametrize(
    ("ring_sizes", "mark"), [((1,), "strategy not measured"), ((3,), "strategy measured at one size"), ((1, 2), "")]
)
def test_a_strategy_that_hardly_ran_is_no_measured_one(ring_sizes: tuple[int, ...], mark: str) -> None:
    """A run of one rank exchanges nothing, but gave ring half the interval of a strategy that never ran."""
    sizes = [("ps", n, 1) for n in (1, 2, 4)] + [("ring", n, 0) for n in ring_sizes]
    runs = [
        make_run(n, rate, name=f"{name}-{n}-{rate}", strategy=name, servers=servers, nodes=n + servers)
        for name, n, servers in sizes
        for rate in (100 * n * 0.9**n, 101 * n * 0.9**n)
    ]
    told = answer(Question(nodes=(16,), strategies=("ring", "tree")), runs)
    rows = {row.job.strategy: row for row in told.predictions}
    assert {item for item in rows["ring"].marks if item.startswith("strategy")} == ({mark} if mark else set())
    if ring_sizes == (1,):
        ring, tree = (rows[name].step_seconds for name in ("ring", "tree"))
        assert ring.high / ring.low > 0.7 * tree.high / tree.low


def test_the_run_that_is_missing_is_accepted(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    """The command that the error asks for is accepted as a job."""
    write_run(tmp_path / "one", make_record(4))
    refused = ask_hpcdl(["predict", tmp_path / "one"])
    command = refused.err.partition("run hpcdl ")[2].partition(" too, or")[0]
    finished = ask_hpcdl(["submit", "--dry-run", "--", *shlex.split(command)])
    assert refused.code == 2 and command.startswith("train ") and "--data" in command
    assert finished.code == 0, finished.err


def test_one_node_and_a_network_are_enough(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    write_study(tmp_path / "one", sizes=(1,))
    finished = ask_hpcdl(["predict", tmp_path / "one", "--network", "omni-path", "--nodes", "4", "--json"])
    assert finished.code == 0, finished.err
    assert any("nothing could be held out" in line for line in json.loads(finished.out)["warnings"])


def test_nothing_measured_says_so(ask_hpcdl: CommandLine) -> None:
    line = ["predict", "--model", "resnet50", "--machine", "cori-knl", "--network", "aries", "--nodes", "64", "--json"]
    finished = ask_hpcdl(line)
    assert finished.code == 0, finished.err
    document = json.loads(finished.out)
    row = document["predictions"][0]
    assert row["step_seconds"]["high"] > 1.5 * row["step_seconds"]["low"] and "nothing measured" in row["marks"]
    assert "guessed" in document["warnings"][0]


def test_a_published_table_is_evidence(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    rows = ["strategy,model,nodes,ranks,batch_per_rank,step_seconds,queue,accurcy"]
    seconds = {1: 1.0, 2: 1.05, 4: 1.08, 8: 1.1}
    rows += [f"Horovod,googlenet,{n},{n},32,{one},short,1" for n, one in seconds.items()]
    path.write_text("\n".join(rows))
    finished = ask_hpcdl(["predict", "--import", "csv", path, "--nodes", "16", "--strategy", "mpi", "--json"])
    assert finished.code == 0, finished.err
    row = json.loads(finished.out)["predictions"][0]
    hint = "unknown columns are not used: queue, accurcy; did you mean 'accuracy' by 'accurcy'?"
    assert any(line.endswith(hint) for line in json.loads(finished.out)["warnings"])
    assert 1.05 < row["step_seconds"]["mean"] < 1.3 and row["efficiency"]["mean"] == pytest.approx(0.88, abs=0.06)


def test_what_the_runs_do_not_bound_is_not_printed(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    """Two runs that contradict every model bound nothing: no number, no advice, and no interval of 1e+12 %."""
    table = tmp_path / "two.csv"
    table.write_text(
        "strategy,model,nodes,ranks,batch_per_rank,images_per_second\n"
        "ring,resnet50,1,1,64,19.479\nring,resnet50,2,2,64,128.170\n"
    )
    line = ["predict", "--import", "csv", table, "--strategy", "ring,ps", "--nodes", "8,64"]
    finished = ask_hpcdl(line)
    assert finished.code == 0 and "next:" not in finished.err, finished.err
    assert "below 80 %" not in finished.out and "best on" not in finished.out, finished.out
    assert "not bounded by these runs: ring on 8, 64 nodes *\n" in finished.out and "ring  " not in finished.out
    assert "the runs do not bound the step; repeat them" in " ".join(finished.out.split())
    known = {"mean": None, "low": None, "high": None}
    assert all(row["step_seconds"] == known for row in ask_hpcdl([*line, "--json"]).json()["predictions"])
    drawn = tmp_path / "drawn"
    assert ask_hpcdl([*line, "--out", drawn]).code == 0
    assert [path.name for path in drawn.iterdir()] == ["predict.json"], "a figure without a point says nothing"
    out = tmp_path / "report"
    report = ask_hpcdl(["report", "--import", "csv", table, "--out", out, "--format", "terminal,csv,html"])
    assert report.code == 0 and "not bounded by these runs: ring * on " in report.out, report.err
    assert report.out.count("not bounded") == 4, "a line for each strategy, not a table of it"
    forecasts = (out / "tables" / "prediction-resnet50-predicted-steps.csv").read_text()
    assert "ring *,4,4,,not bounded,not bounded,not bounded,,," in forecasts
    assert not list((out / "figures").glob("prediction*"))


def test_strong_runs_beside_weak_ones_are_not_passed_over_in_silence(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    weak = [f"weak,ring,resnet50,{n},{n},64,{50 * n}" for n in (1, 2, 4)]
    strong = [f"strong,ring,resnet50,{n},{n},{256 // n},{60 * n / (1 + n / 20)}" for n in (1, 2, 8, 16)]
    reported = []
    for rows in ([*weak, *strong], weak, strong):
        table = tmp_path / "mixed.csv"
        table.write_text("\n".join(["mode,strategy,model,nodes,ranks,batch_per_rank,images_per_second", *rows]))
        words = " ".join(
            ask_hpcdl(["predict", "--import", "csv", table, "--strategy", "ring", "--nodes", "32"]).out.split()
        )
        reported.append(
            "runs of strong scaling are used, but not continued: sizes are predicted for 64 samples" in words
        )
    assert reported == [True, False, False]


def test_runs_that_no_model_fits_are_named(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    """Runs whose steps get faster with workers were predicted as even, without a word on the misfit."""
    reported = {}
    for name, first in (("faster", 38.0), ("even", 50.0)):
        table = tmp_path / f"{name}.csv"
        rows = [f"ring,resnet50,{n},{n},64,{k},{(50 if n > 1 else first) * n * (1 + 0.003 * k)}" for n in (1, 2, 4, 8)
                for k in (0, 1, 2)]  # fmt: skip
        table.write_text("\n".join(["strategy,model,nodes,ranks,batch_per_rank,repeat,images_per_second", *rows]))
        reported[name] = ask_hpcdl(["predict", "--import", "csv", table, "--strategy", "ring", "--nodes", "16"]).out
    assert "no model fits these runs" not in reported["even"]
    words = " ".join(reported["faster"].split())
    assert "1 of 4 measured sizes is missed by more than 10 %; ring on 1 worker took 1.68 s, " in words, words


def test_strong_scaling_is_named_by_its_whole_batch(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    table = tmp_path / "strong.csv"
    rows = [f"ring,resnet50,{n},{n},256,{rate}" for n, rate in ((1, 50.0), (2, 96.0), (4, 175.0))]
    table.write_text("\n".join(["strategy,model,nodes,ranks,global_batch,images_per_second", *rows]) + "\n")
    finished = ask_hpcdl(["predict", "--import", "csv", table, "--strategy", "ring", "--nodes", "2,8"])
    assert finished.out.startswith("resnet50, 256 samples in all:"), finished.out


def test_another_node_type_is_marked(ask_hpcdl: CommandLine, study: Path) -> None:
    line = ["predict", study, "--nodes", "8", "--strategy", "ring", "--json"]
    here, there = (json.loads(ask_hpcdl([*line, *more]).out)["predictions"][0]
                   for more in ([], ["--machine", "xeon-max-snc4-flat"]))  # fmt: skip
    assert "another node type" in there["marks"]
    ratios = [row["step_seconds"]["high"] / row["step_seconds"]["low"] for row in (here, there)]
    assert there["step_seconds"]["mean"] < here["step_seconds"]["mean"] and ratios[1] > 1.5 * ratios[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing to predict from"),
        (["--model", "resnet50"], "the network"),
        (["--network", "aries"], "the model"),
        (["--model", "mine", "--network", "aries"], "its operations are not known; give FILE.keras"),
        (["STUDY", "--model", "lenet"], "runs say what they trained"),
        (["STUDY", "--nodes", "0"], "not a number of nodes"),
        (["STUDY", "--nodes", "1,x"], "not a number of nodes"),
        (["STUDY", "--strategy", "rings"], "did you mean 'ring'"),
        (["STUDY", "--strategy", "single", "--nodes", "4"], "one worker"),
        (["STUDY", "--strategy", "ps", "--servers", "9", "--nodes", "4"], "no room"),
        (["STUDY", "--servers", "0"], "--servers 0"),
        (["STUDY", "--batch-size", "0"], "--batch-size 0"),
        (["STUDY", "--placement", "best"], "round-robin"),
        (["STUDY", "--target", "197%"], "'197%' is no accuracy; write for example 98% or 0.98"),
        (["STUDY", "--target", "99.9%"], "no run of"),
        (["STUDY", "--network", "1us,0"], "more than nothing"),
        (["STUDY", "--machine", "nowhere"], "unknown machine"),
        (["STUDY", "--import", "tsv", "x"], "only csv"),
        (["--import", "csv", "missing.csv"], "no such file"),
        (["ONE"], "so nothing shows what an exchange costs"),
        (["FAILED"], "has a throughput"),
        (["MIXED"], "of 2 kinds of nodes by machine"),
        (["EMPTY"], "holds no record.json"),
    ],
)  # fmt: skip
def test_nonsense_is_answered_with_what_is_missing(
    ask_hpcdl: CommandLine, study: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    if words == ["ONE"]:
        write_run(folder / "one", make_record(4))
    if words == ["FAILED"]:
        write_run(folder / "failed", make_record(2, status="failed"))
        write_run(folder / "zero", make_record(1, None, steps=0, step_seconds=[]))
    if words == ["MIXED"]:
        write_run(folder / "a", make_record(1, machine="knl"))
        write_run(folder / "b", make_record(2, machine="skx", hosts=["x", "y"]))
    made = {"STUDY": study, "ONE": folder, "FAILED": folder, "MIXED": folder, "EMPTY": folder}
    finished = ask_hpcdl(["predict", *(made.get(word, word) for word in words)])
    assert finished.code == 2, finished.out
    assert says in finished.err and "Traceback" not in finished.err
    assert len(finished.err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", MODELS)
def test_every_network_s_variables_are_known(name: str) -> None:
    assert sum(lengths_of(name, None)) == MODELS[name].parameters
    assert sum(lengths_of(name, MODELS[name].gradient_bytes - 400)) == MODELS[name].parameters - 100
