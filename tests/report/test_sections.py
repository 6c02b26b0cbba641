"""Each section appears if its data exist, and only then; published points are labelled as published."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcdl.core.errors import CorruptError
from hpcdl.core.records.run_record import HistoryPoint, RankRecord
from hpcdl.launch.traced import summary_of
from hpcdl.report.analysis.analyse import analyse
from hpcdl.report.analysis.settings import shortened_numbers
from hpcdl.report.compose.build import compose
from hpcdl.report.compose.summary import accuracy_line, summary
from hpcdl.report.document import Document, Figure, Section, Table, cell_text
from hpcdl.report.renderers.figures import svg
from hpcdl.report.runs.anonymous import WITHHELD, anonymised_traces
from hpcdl.report.runs.findings import TracedRun
from hpcdl.report.runs.published import Published, load_references
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.sources import Gathered
from hpcdl.report.sections.learning import representatives
from hpcdl.trace.counters import NETWORK
from hpcdl.trace.findings import findings
from tests.conftest import ROOT
from tests.report.synthetic import as_run, make_record, make_run
from tests.trace.test_findings import CALM_S, RANKS, planted, synchronous


def document(runs: list[Run]) -> Document:
    return compose(analyse(Gathered(runs=tuple(runs)), references=load_references()))


def names(runs: list[Run]) -> set[str]:
    return {section.name for section in document(runs).sections}


def section(runs: list[Run], name: str) -> Section:
    return next(item for item in document(runs).sections if item.name == name)


def texts(item: Table) -> list[list[str]]:
    return [[cell_text(column, cell) for column, cell in zip(item.columns, row, strict=True)] for row in item.rows]


def test_the_summary_names_each_base_and_prefers_none_that_began_large() -> None:
    """`tree about 94 % at 8` beside `ring ..., from 1 worker` was relative to 4 workers, without a word."""
    rates = {"ring": {1: 100.0, 4: 360.0, 8: 640.0}, "tree": {4: 370.0, 8: 700.0}, "mpi": {1: 100.0, 8: 600.0}}
    runs = [make_run(n, rate, strategy=name) for name, by_size in rates.items() for n, rate in by_size.items()]
    line = next(line for line in summary(analyse(Gathered(runs=tuple(runs)))) if line.startswith("Scaling"))
    assert line.startswith("Scaling: ring keeps about 80.0 % (measured once, no interval) efficiency at 8 workers")
    assert "mpi about 75.0 % (measured once, no interval) at 8, tree" in line, line
    assert "tree about 94.6 % (measured once, no interval) at 8, from 4 workers" in line, line


def test_a_base_of_another_strategy_makes_the_efficiency_of_a_size_alone() -> None:
    runs = [make_run(1, 100.0, strategy="single"), make_run(2, 160.0), make_run(2, 160.5)]
    found = analyse(Gathered(runs=tuple(runs)), base="single")
    assert summary(found)[0].startswith("Scaling: ring keeps about 80.1 %")
    assert not any("one size alone" in line for line in found.warnings)
    (weak,) = (section for section in compose(found).sections if section.name == "weak")
    (table,) = (item for item in weak.items if isinstance(item, Table))
    assert any("80.1 %" in cell for row in texts(table) for cell in row)


def test_runs_of_one_seed_count_once_for_what_was_learned() -> None:
    alike = [make_run(1, 100.0 + i, loss=0.5, accuracy=0.9, config={"seed": "7"}) for i in range(3)]
    (table,) = (item for item in section(alike, "learning").items if isinstance(item, Table))
    row = dict(zip([column.name for column in table.columns], texts(table)[0], strict=True))
    assert row["accuracy"] == "90.0 % †" and "±" in row["images/s"]


def test_figures_show_the_repeat_of_middle_accuracy() -> None:
    runs = [run_with_history(2, "ring", (0.1, accuracy)) for accuracy in (0.12, 0.9, 0.88)]
    figures = [item for item in section(runs, "learning").items if isinstance(item, Figure)]
    assert figures[0].alt == "accuracy against epochs: ring ends at 88 %."


def test_a_run_without_a_finite_loss_does_not_stand_for_its_setting() -> None:
    runs = [make_run(1, 100.0, name=name, loss=loss) for name, loss in (("nan", None), ("sound", 0.1))]
    assert representatives([runs])[0][1].name == "sound"


def test_a_lone_imported_run_has_no_scaling_time_or_network() -> None:
    assert names([make_run(1, 100.0)]) == {"setup", "learning", "cost"}


def test_the_hyper_parameters_of_what_ran_are_listed() -> None:
    configs = [{"learning-rate": rate, "momentum": "0.5", "optimizer": "momentum", "seed": "7", "crop-padding": "0"}
               for rate in ("0.1", "0.01")]  # fmt: skip
    found = section([make_run(1, 90.0, config=config) for config in configs] + [make_run(2, 90.0)], "setup")
    table = next(item for item in found.items if isinstance(item, Table) and "Hyper" in item.title)
    rows = {row[0]: row[1:] for row in texts(table)}
    assert rows["learning-rate"] == ["0.01, 0.1", "0.01"]
    assert rows["momentum"][0] == "0.5" and rows["seed"][0] == "7"
    assert "crop-padding" not in rows  # the default is not shown
    assert "1 run of elsewhere" in table.note
    assert len(section([make_run(1, 90.0)], "setup").items) == 1


def test_only_failed_runs_still_make_a_report() -> None:
    found = document([make_run(1, None, status="failed", message="rank 0 died")])
    assert [item.name for item in found.sections] == ["setup"]
    assert found.summary[2] == "Throughput: no usable measurement."


@pytest.mark.parametrize(
    ("runs", "name"),
    [
        ([make_run(n, 90.0 * n) for n in (1, 2)], "weak"),
        ([make_run(n, 90.0 * n, batch_per_rank=64 // n, mode="strong") for n in (1, 2)], "strong"),
        ([make_run(1, 90.0 * n, threads=n) for n in (1, 2)], "scale-up"),
        ([make_run(1, 90.0, parts={"compute": 0.3})], "time"),
        ([make_run(2, 90.0, bytes_per_step=1e6)], "network"),
        ([make_run(2, 90.0), make_run(2, 80.0, strategy="tree")], "strategies"),
        ([make_run(n, 90.0 * n) for n in (1, 2, 4)], "fits"),
        ([make_run(n, 90.0 * n) for n in (1, 2)], "references"),
    ],
)
def test_each_section_appears_with_its_data(runs: list[Run], name: str) -> None:
    assert name in names(runs)
    assert name not in names([make_run(1, 100.0)])


def test_curves_with_bases_of_other_sizes_have_ideal_lines_of_their_own() -> None:
    """A speed-up of 2 from 4 to 8 workers is ideal, and was drawn at a quarter of a line from 1 worker."""
    batches = {1: 64, 2: 32, 4: 32, 8: 16}
    runs = [make_run(n, 90.0 * n, batch_per_rank=batch, mode="strong") for n, batch in batches.items()]
    figures = {item.name: item for item in section(runs, "strong").items if isinstance(item, Figure)}
    for name, of_measure in {"strong-throughput": [90, 180, 360, 720], "strong-speedup": [1, 2, 1, 2]}.items():
        lines = {line.label: (line.x, line.y) for line in figures[name].series if line.style == "ideal"}
        assert lines["ideal, from 1 worker"] == ([1, 2], pytest.approx(of_measure[:2]))
        assert lines["ideal, from 4 workers"] == ([4, 8], pytest.approx(of_measure[2:]))


def test_summary_has_six_lines_with_numbers() -> None:
    runs = [as_run(make_record(n, 90.0 * n + repeat), f"r{n}{repeat}") for n in (1, 2) for repeat in range(3)]
    scaling, what, throughput, time, accuracy, _ = document(runs).summary
    assert what == "What ran: 6 runs of lenet on digits by ring, with 1 to 2 workers, on up to 2 nodes of lab."
    failed = make_run(8, None, status="failed")
    line = document([*runs, failed]).summary[1]
    assert line == f"{what.rstrip('.')}; 1 more run failed or cannot be used, listed below."
    assert throughput.startswith(
        "Throughput: at best 181.0 ± 2.5 images/s (lenet by ring with 2 workers x batch 32; mean"
    )
    assert scaling == (
        "Scaling: ring keeps 99.5 % [97.2, 101.7 %] efficiency at 2 workers, from 1 worker "
        "(weak scaling: batch per worker fixed; 100 % is ideal)."
    )
    assert "70.0 % computing, 10.0 % communication that computing does not hide" in time
    assert accuracy.startswith(
        "Accuracy: 88.0 % on held-out samples, the median of 3 runs of the setting (lenet by ring with 1 worker"
    )


def test_settings_that_nobody_typed_are_short() -> None:
    """A search's learning rates have 17 digits, which labels repeated; rates that look alike keep them."""
    rates = ("0.012132675491046142", "0.0311256170909018", "0.01")
    runs = [make_run(1, 100.0, config={"learning-rate": rate}) for rate in rates]
    (single,) = [line for line in document(runs).warnings if "measured" in line or "measurement" in line]
    assert "learning-rate 0.01213" in single and "learning-rate 0.03113" in single and "0.012132" not in single
    (row,) = [row for row in texts(section(runs, "setup").items[1]) if row[0] == "learning-rate"]  # type: ignore[arg-type]
    assert row[1] == "0.01, 0.01213, 0.03113"
    alike = ("0.012132675491046142", "0.012132675491046143")
    assert shortened_numbers(alike) == dict(zip(alike, alike, strict=True))


def test_the_fastest_setting_names_its_threads() -> None:
    lines = document([make_run(1, rate, threads=n) for n, rate in ((1, 40.0), (64, 900.0), (128, 800.0))]).summary
    assert any("1 worker x batch 32 on 64 threads; one run" in line for line in lines), lines


def test_rounding_is_not_shown_as_a_parameter() -> None:
    """Throughputs that are exactly linear had a serial fraction of 9.76e-17."""
    (table,) = [item for item in section([make_run(n, 180.0 * n) for n in (4, 8, 16, 32)], "fits").items
                if isinstance(item, Table)]  # fmt: skip
    parameters = {row[1]: row[2] for row in texts(table)}
    assert parameters["gustafson"] == "serial fraction 0 [0, 0]" and "e-" not in parameters["usl"], parameters


def test_an_efficiency_of_single_runs_does_not_look_sure() -> None:
    line = document([make_run(1, 100.0), make_run(2, 130.0)]).summary[0]
    assert line.startswith("Scaling: ring keeps about 65.0 % (measured once, no interval) efficiency at 2 workers")


@pytest.mark.parametrize(
    "repeats, largest, reported",
    [
        (2, "wait", "Next: repeat the runs; 2 of 2 settings have fewer than 3"),
        (3, "wait", "Next: 40.0 % of a step is waiting for the slowest worker; `hpcdl doctor --nodes all`"),
        (3, "input", "Next: 40.0 % of a step is waiting for input; `hpcdl bench input DATA`"),
        (3, "compute", "Next: run it with more workers"),
    ],
)
def test_the_summary_ends_with_what_to_do_next(repeats: int, largest: str, reported: str) -> None:
    parts = {"input": 0.05, "compute": 0.5, "wait": 0.05, "exposed_communication": 0.05, "update": 0.01, "other": 0.0}
    parts[largest] = 0.0
    parts[largest] = sum(parts.values()) * (2 / 3 if largest != "compute" else 10)
    made = [make_record(n, 90.0 * n + repeat, parts=parts) for n in (1, 2) for repeat in range(repeats)]
    found = document([as_run(record, f"r{number}") for number, record in enumerate(made)]).summary
    assert found[-1].startswith(reported) and [line.startswith("Next: ") for line in found].count(True) == 1


def test_the_accuracy_of_a_run_that_did_not_finish_is_called_so() -> None:
    history = [HistoryPoint(epoch=2.0, step=44, seconds=1.0, loss=0.5, val_accuracy=0.9)]
    record = make_record(1, 90.0, history=history, evaluated_on="val", status="stopped")
    found = document([as_run(record, "part")])
    text = "no finished run has one; part (stopped) had 90.0 % on the split val by epoch 2"
    assert f"Accuracy: {text}." in found.summary


def test_a_network_that_only_waits_has_learned_nothing() -> None:
    found = document([as_run(make_record(n, 90.0 * n, model="emulated:lenet:2s"), f"r{n}") for n in (1, 2)])
    assert found.summary[-2] == "Accuracy: not evaluated in these runs."
    shown = {item.name for part in found.sections for item in part.items if isinstance(item, Figure)}
    assert "loss-epochs" in shown and not [name for name in shown if "accuracy" in name]


def traffic_runs(*settings: tuple[str, float, float], workers: int = 4, repeats: int = 3) -> list[Run]:
    """Return runs with these bytes per step and this final accuracy, reached at the fifth of five evaluations."""
    return [
        as_run(
            make_record(
                workers, 90.0 + repeat, strategy=strategy, bytes_sent_per_step=sent, repeat=repeat,
                history=[HistoryPoint(epoch=float(epoch), step=100 * epoch, seconds=float(epoch), loss=1.0,
                                      val_accuracy=best - 0.1 * (5 - epoch)) for epoch in range(1, 6)],
            ),
            f"{strategy}-{workers}-{repeat}",
        )
        for strategy, sent, best in settings for repeat in range(repeats)
    ]  # fmt: skip


def test_what_traffic_buys_is_shown_where_runs_differ_much_in_it() -> None:
    found = section(traffic_runs(("ring", 4e6, 0.955), ("diloco", 1e5, 0.97)), "traffic")
    (figure,) = [item for item in found.items if isinstance(item, Figure)]
    assert [(one.label, one.x[-1], one.y[-1]) for one in figure.series] == [
        ("diloco", pytest.approx(5e7 / 2**30), 0.97), ("ring", pytest.approx(2e9 / 2**30), 0.955),
    ]  # fmt: skip
    assert figure.x_log and figure.y_percent and figure.x_label == "GiB sent by a rank"
    assert "diloco ends at 97 % after 0.0466 GiB" in figure.alt
    drawn = svg(figure)
    assert all(f">{tick}</text>" in drawn for tick in ("0.0156", "0.0625", "0.250", "1")), "ticks are powers of two"
    (table,) = [item for item in found.items if isinstance(item, Table)]
    assert texts(table) == [
        ["diloco", "3", "97.7 KiB ± 0 B", "47.7 MiB ± 0 B", "2.5 %", "97.0 ± 0.0 %", "47.7 MiB ± 0 B"],
        ["ring", "3", "3.81 MiB ± 0 B", "1.86 GiB ± 0 B", "100.0 %", "95.5 ± 0.0 %", "1.86 GiB ± 0 B"],
    ]
    assert (
        "4 workers: to 95 % accuracy a rank sent 47.7 MiB by diloco, and 1.86 GiB by ring, 40 times" in found.lines[1]
    )


@pytest.mark.parametrize("settings", [
    [("ring", 4e6, 0.95), ("halving-doubling", 4e6, 0.95)],
    [("ring", 4e6, 0.95), ("ps", 2.1e6, 0.95)],
    [("ring", 4e6, 0.95)],
])  # fmt: skip
def test_runs_of_about_as_much_traffic_say_nothing_of_it(settings: list[tuple[str, float, float]]) -> None:
    assert "traffic" not in names(traffic_runs(*settings))


def test_traffic_is_compared_among_as_many_workers_only() -> None:
    apart = [*traffic_runs(("ring", 4e6, 0.95), workers=2), *traffic_runs(("diloco", 1e5, 0.95), workers=4)]
    assert "traffic" not in names(apart)
    both = [run for n in (2, 4, 8) for run in traffic_runs(("ring", 4e6, 0.95), ("diloco", 1e5, 0.95), workers=n)]
    found = section(both, "traffic")
    assert [item.name for item in found.items if isinstance(item, Figure)] == ["accuracy-traffic", "accuracy-traffic-2"]
    titles = [item.title for item in found.items if isinstance(item, Table)]
    assert titles == [f"What traffic buys, {n} workers" for n in (8, 4, 2)]
    assert "The figures show 2 of 3" in found.lines[-1]


def test_an_accuracy_that_a_run_never_reached_has_no_bytes() -> None:
    made = traffic_runs(("ring", 4e6, 0.99), ("diloco", 1e5, 0.95), repeats=2)
    low = dataclasses.replace(made[-1], history=tuple(dataclasses.replace(point, val_accuracy=0.1)
                                                      for point in made[-1].history))  # fmt: skip
    (table,) = [item for item in section([*made[:-1], low], "traffic").items if isinstance(item, Table)]
    rows = {row[0]: row for row in texts(table)}
    assert table.columns[-1].name == "sent to 52 %" and rows["diloco"][-1] == "–" != rows["ring"][-1]


def test_servers_balance_is_shown() -> None:
    servers = [
        RankRecord(rank=2 + i, host="s", role="server", bytes_sent_per_step=size, busy_seconds_per_step=seconds)
        for i, (size, seconds) in enumerate(((1e6, 0.1), (3e6, 0.3)))
    ]
    record = make_record(2, 90.0, strategy="ps", ranks=4, servers=2, rank_records=servers)
    found = section([as_run(record, "r")], "network")
    balance = next(item for item in found.items if isinstance(item, Table) and "Balance" in item.title)
    assert texts(balance)[0][1:] == ["2", "1.91 MiB", "2.86 MiB", "1.50", "300 ms", "1.50"]


def test_servers_that_count_nothing_show_what_is_on_them() -> None:
    """Servers of TensorFlow show the bytes placed on them: zero traffic would claim that they are balanced."""
    sizes = [30_000_000, 100, 200, 16]
    ranks = [
        RankRecord(rank=0, host="a", bytes_sent_per_step=0.0, details={"server_bytes": sizes, "placement": "greedy"}),
        *(RankRecord(rank=1 + i, host="s", role="server", bytes_sent_per_step=0.0) for i in range(4)),
    ]
    record = make_record(2, 90.0, strategy="grpc-ps", ranks=6, servers=4, rank_records=ranks, bytes_sent_per_step=0.0)
    run = as_run(record, "r")
    assert run.bytes_per_step is None and run.rounds_per_step is None
    found = section([run], "network")
    balance = next(item for item in found.items if isinstance(item, Table) and "Balance" in item.title)
    assert float(texts(balance)[0][4]) == pytest.approx(max(sizes) / (sum(sizes) / 4), rel=0.01)
    assert any("theirs are computed" in line for line in found.lines)
    bare = dataclasses.replace(record, rank_records=[dataclasses.replace(ranks[0], details={}), *ranks[1:]])
    assert as_run(bare, "r").server_loads == ()


def test_published_points_are_labelled_and_as_published() -> None:
    published = {(item.source, item.workers, item.model): item for item in load_references().points}
    assert published["Cori", 512, "resnet50"].quoted_efficiency == "23 %"
    assert published["Cori", 128, "resnet50"].quoted_efficiency == "> 80 %"
    assert published["SC17", 64, "unspecified"].quoted_efficiency == "91.5 %"
    found = section([make_run(n, 90.0 * n) for n in (1, 2)], "references")
    (figure,) = [item for item in found.items if isinstance(item, Figure)]
    assert {series.label.split(":")[0] for series in figure.series} == {"this study", "published"}
    assert all(series.style == "published" for series in figure.series if series.label.startswith("published"))


def test_every_published_fact_has_its_sentence() -> None:
    found = load_references()
    facts = [*found.points, *found.statements]
    assert {item.source for item in facts} == {"Cori", "BNL", "Stampede2", "SC17", "Theta"}
    for item in facts:
        assert len(item.sentence.split()) > 8
        assert item.sentence.startswith("(in our words)") == ("other words" in item.confidence)
        assert (ROOT / "share" / "hpcdl" / "studies" / f"{item.study}.toml").is_file(), item
    cori = [item for item in found.points if (item.source, item.model) == ("Cori", "resnet50")]
    assert {item.mode for item in cori} == {"unstated"}, "its abstract does not say what is kept fixed"
    assert all("does not say" in item.note for item in found.points if item.named)


def test_published_facts_stand_beside_the_study_that_repeats_them() -> None:
    """Published facts appear beside a study that repeats them: also facts without points, or without a network."""
    threads = [make_run(1, 100.0 * n, threads=n, mode="scale-up", strategy="single") for n in (1, 2, 4)]
    (table,) = [item for item in section(threads, "references").items if isinstance(item, Table)]
    rows = [" ".join(row) for row in texts(table)]
    for words in ("64 threads are best", "3.7 x and 1.4 x", "K40", "P100"):
        assert any(words in row and "stampede2-threads" in row for row in rows), words
    assert any("1605 s in one group" in row and "sc17-groups" in row for row in rows)
    assert any("87 % to 14 %" in row and "sc17-variants" in row for row in rows)
    weak = [make_run(n, 90.0 * n, model="googlenet", strategy="sync-easgd") for n in (1, 2)]
    tables = [item for item in section(weak, "references").items if isinstance(item, Table)]
    assert any("91.5 %" in text and "sc17-weak" in text for row in texts(tables[0]) for text in (" ".join(row),))


def evaluated(strategy: str, accuracies: Sequence[float], split: str) -> list[Run]:
    points = [HistoryPoint(epoch=1, step=1, seconds=1, val_accuracy=accuracy) for accuracy in accuracies]
    return [make_run(2, strategy=strategy, history=(point,), evaluated_on=split) for point in points]


def test_the_accuracy_is_the_median_of_a_setting_and_names_its_split() -> None:
    """The reported accuracy is the median of a setting (0.7), not its luckiest run (0.99), and names its split."""
    lucky, steady = evaluated("ring", (0.7, 0.99, 0.6), "val"), evaluated("tree", (0.9, 0.8, 0.85), "val")
    analysis = analyse(Gathered(runs=(*lucky, *steady)))
    assert accuracy_line(analysis) == "validation accuracy: 85.00 % (lenet, tree, 2 workers, median of 3 runs)"
    assert summary(analysis)[-2].endswith("), the highest of 2 settings.")
    tested = evaluated("mpi", (0.95,), "test")
    assert accuracy_line(analyse(Gathered(runs=tuple(tested)))).startswith("test accuracy: 95.00 %")
    assert "85.0 % on the split val" in summary(analyse(Gathered(runs=(*steady, *tested))))[-2]
    assert "measured on the split test or on the split val." in " ".join(section([*steady, *tested], "learning").lines)


def test_quotes_are_those_of_their_documents() -> None:
    """Quotes match their documents exactly, or are marked as summaries."""
    quotes = (ROOT / "tests" / "report" / "published-quotes.md").read_text()
    found = load_references()
    for item in (*found.points, *found.statements):
        assert item.sentence.startswith("(in our words)") or f"> {item.sentence}\n" in quotes, item.sentence


def test_a_damaged_reference_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[source]\nname = 'x'\n")
    with pytest.raises(CorruptError, match=r"x\.toml is damaged"):
        load_references(tmp_path)


def test_without_references_there_is_no_such_section(tmp_path: Path) -> None:
    assert load_references(tmp_path / "absent") == Published()


def traced() -> TracedRun:
    """A run in which one rank shares its processor with other processes."""
    merged, steps = planted("processor contention", 1)
    return summary_of("ring-4", findings(merged, steps))


def test_traced_runs_show_the_inside_of_their_steps() -> None:
    analysis = analyse(Gathered(runs=(make_run(4),)), traced=[traced()])
    found = compose(analysis)
    (shown,) = (item for item in found.sections if item.name == "trace")
    slow = traced().slow_ranks[0]
    assert shown.lines[0] == f"Waited for step after step: rank {slow.rank} of ring-4 (processor contention)."
    tables = {item.title: item for item in shown.items if isinstance(item, Table)}
    path = tables["Critical path of a step"]
    assert sum(float(row[3]) for row in path.rows if isinstance(row[3], float)) == pytest.approx(1)
    assert tables["Ranks that the others wait for"].rows[0][:4] == ("ring-4", slow.rank, slow.host, slow.cause)
    assert found.data["traces"][0]["slow_ranks"][0]["cause"] == "processor contention"
    (hidden,) = anonymised_traces([traced()])
    assert {one.host for one in hidden.slow_ranks} == {WITHHELD}


def test_traced_runs_show_what_their_hosts_carried_over_time() -> None:
    mebi = 2.0**20
    merged, steps = synchronous(*CALM_S, rates=[{NETWORK: 50 * mebi * (rank == 1)} for rank in range(RANKS)])
    run = summary_of("ring-4", findings(merged, steps, link_bytes_per_second=100 * mebi))
    found = compose(analyse(Gathered(runs=(make_run(4),)), traced=[run]))
    (shown,) = (item for part in found.sections for item in part.items if getattr(item, "name", "") == "trace-network")
    assert isinstance(shown, Figure) and "50 MiB/s, by host1 in ring-4" in shown.alt
    (curve,) = shown.series
    assert (curve.label, len(curve.x)) == ("ring-4, host1", 9) and curve.y == pytest.approx([50] * 9)
    assert curve.x[0] == pytest.approx(0.5) and curve.x[-1] == pytest.approx(8.5)
    assert texts(shown.table) == [["ring-4", "host1", "50 MiB", "50 MiB", "25.0 %"]]
    assert found.data["traces"][0]["network"][0]["samples"][0] == pytest.approx((0.5, 50 * mebi))
    (hidden,) = anonymised_traces([run])
    assert [one.host for one in hidden.network] == ["host 1"]


def test_without_counts_of_interfaces_there_is_no_network_over_time() -> None:
    found = compose(analyse(Gathered(runs=(make_run(4),)), traced=[traced()]))
    assert not [item for part in found.sections for item in part.items if getattr(item, "name", "") == "trace-network"]


def test_cost_to_an_accuracy_needs_all_repeats() -> None:
    """One repeat of the larger size never reaches the accuracy: the mean of the others is no cost of that size."""
    runs = [
        run_with_history(n, strategy, (0.5, 0.5 if (n, repeat) == (2, 0) else 0.9))
        for n, strategy in ((1, "ring"), (1, "ps"), (2, "ring"))
        for repeat in range(3)
    ]
    document = compose(analyse(Gathered(runs=tuple(runs))))
    rows = {row[0]: row for row in document.tables()["cost-node-hours"].rows}
    assert {name: row[-1] is None for name, row in rows.items()} == {
        "ps, 1 worker, weak": False, "ring, 1 worker, weak": False, "ring, 2 workers, weak": True
    }  # fmt: skip


def run_with_history(n: int, strategy: str, accuracies: Sequence[float]) -> Run:
    """Return a run evaluated after each epoch of a second."""
    history = [
        HistoryPoint(epoch=epoch, step=epoch, seconds=epoch, val_accuracy=accuracy)
        for epoch, accuracy in enumerate(accuracies, start=1)
    ]
    record = make_record(n, 100.0 * n, strategy=strategy, history=history)
    return as_run(record, f"{strategy}-{n}")
