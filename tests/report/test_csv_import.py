"""CSV rows become runs, or an error names the wrong cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdl.core.errors import ConfigError, SourceError
from hpcdl.predict.jobs import has_servers
from hpcdl.report.analysis.caveats import caveats
from hpcdl.report.analysis.scaling import build_curves
from hpcdl.report.runs.doubts import WITH_SERVERS
from hpcdl.report.runs.imported import read_csv
from hpcdl.report.runs.run import Run
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine

HEADER = "mode,strategy,model,nodes,ranks,batch_per_rank,repeat,images_per_second"


def rows(tmp_path: Path, *lines: str, header: str = HEADER) -> tuple[Run, ...]:
    path = tmp_path / "old.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return read_csv(path).runs


def test_documented_columns_are_read(tmp_path: Path) -> None:
    (run,) = rows(tmp_path, "weak,horovod,resnet50,4,8,64,1,1234.5")
    assert (run.mode, run.strategy, run.model, run.nodes, run.ranks) == ("weak", "horovod", "resnet50", 4, 8)
    assert (run.workers, run.ranks_per_node, run.batch_per_rank, run.global_batch) == (8, 2, 64, 512)
    assert run.images_per_second == 1234.5
    assert run.step_seconds == pytest.approx(512 / 1234.5)


def test_step_seconds_stand_in_for_throughput(tmp_path: Path) -> None:
    header = "strategy,model,nodes,ranks,workers,servers,global_batch,step_seconds,compute_seconds"
    (run,) = rows(tmp_path, "ps,lenet,5,5,4,1,128,0.5,0.4", header=header)
    assert (run.workers, run.servers, run.batch_per_rank) == (4, 1, 32)
    assert run.images_per_second == pytest.approx(256)
    assert run.parts == pytest.approx({"compute": 0.4, "other": 0.1})


def test_parts_beyond_the_step_are_not_used(tmp_path: Path) -> None:
    header = "strategy,model,nodes,ranks,batch_per_rank,step_seconds,compute_seconds,input_seconds"
    (run,) = rows(tmp_path, "ring,lenet,1,1,32,0.5,0.4,0.2", header=header)
    assert not run.parts


def test_spreadsheets_marks_and_spaces_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_bytes(("\ufeff" + HEADER + "\r\nweak, ring ,lenet,1,1,32,1, 99.5\r\n").encode())
    assert read_csv(path).runs[0].strategy == "ring"


@pytest.mark.parametrize(
    ("status", "usable"),
    [("", True), ("COMPLETED", True), ("FAILED", False), ("CANCELLED by 1001", False), ("CANCELLED+", False),
     ("Out of memory", False), ("running", False)],
)  # fmt: skip
def test_runs_that_failed_are_no_measurements(tmp_path: Path, status: str, usable: bool) -> None:
    (run,) = rows(tmp_path, f"weak,ring,lenet,1,1,32,1,640,{status}", header=f"{HEADER},status")
    assert run.usable is usable


def test_an_unknown_status_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"old\.csv:2: status: 'good enough' is unknown; write finished, failed or"):
        rows(tmp_path, "weak,ring,lenet,1,1,32,1,640,good enough", header=f"{HEADER},status")


def test_a_repeat_of_a_run_that_failed_is_not_counted_twice(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_text(f"{HEADER},status\nweak,ring,lenet,1,1,32,1,3,failed\nweak,ring,lenet,1,1,32,1,640,finished\n")
    assert not read_csv(path).remarks


@pytest.mark.parametrize("value", ["0", "-3", "", "nan"])
def test_impossible_throughput_is_kept_for_the_report_to_tell(tmp_path: Path, value: str) -> None:
    (run,) = rows(tmp_path, f"weak,ring,lenet,1,1,32,1,{value}")
    assert not run.usable


def test_all_mistakes_are_reported_with_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rows(tmp_path, "weak,ring,lenet,1,one,32,1,5", "faint,ring,lenet,1,1,32,1,5", "weak,,lenet,1,1,32,1,fast")
    text = str(caught.value)
    assert "old.csv:2: ranks: 'one'" in text
    assert "old.csv:3: mode: 'faint'" in text
    assert "old.csv:4: strategy: is empty" in text
    assert "old.csv:4: images_per_second: 'fast'" in text


def test_missing_columns_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rows(tmp_path, "ring,lenet,1", header="strategy,modell,ranks")
    assert "no column 'model'; did you mean 'modell'?" in str(caught.value)
    assert "neither column 'images_per_second' nor 'step_seconds'" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"strategy,model\n"])
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises((SourceError, ConfigError)):
        read_csv(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        read_csv(tmp_path / "absent.csv")


def test_unknown_and_doubled_rows_are_remarked(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_text(f"{HEADER},note\n" + "weak,ring,lenet,1,1,32,1,99,x\n" * 2)
    remarks = read_csv(path).remarks
    assert any("'note'" in line or "note" in line for line in remarks)
    assert any("1 rows repeat" in line for line in remarks)


def test_scale_up_needs_threads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scale-up needs"):
        rows(tmp_path, "scale-up,ring,lenet,1,1,32,1,99")


COUNTS = "strategy,model,nodes,ranks,workers,servers,batch_per_rank,global_batch,images_per_second,step_seconds"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            "ring,lenet,2,2,,,64,64,98,",
            "global_batch: 64 is not 64 per worker x 2 workers; correct one, leave one empty",
        ),
        ("ring,lenet,4,4,,,,3,98,", "global_batch: 3 samples are fewer than the 4 workers"),
        ("ring,lenet,2,2,,,64,,98,1306", "step_seconds: 1306 s for 128 samples are 0.09801 a second"),
        ("ps,lenet,2,3,,1,64,,98,", "workers: is empty, and 3 ranks may count its servers (1) or not"),
        ("ps,lenet,2,2,2,1,64,,98,", "ranks: 2 cannot be 2 workers and 1 servers"),
        ("ring,lenet,1,1,8,,64,,98,", "ranks: 1 cannot be 8 workers"),
        ("ring,lenet,4,2,,,64,,98,", "nodes: 4 are more than the 2 ranks"),
    ],
)
def test_numbers_of_a_row_that_contradict_each_other_are_refused(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rows(tmp_path, line, header=COUNTS)
    assert f"old.csv:2: {complaint}" in str(caught.value)


def test_numbers_of_a_row_that_agree_are_taken(tmp_path: Path) -> None:
    even, rounded, passes = rows(
        tmp_path,
        "ps,lenet,2,3,2,1,64,128,98,1.3,",
        "ring,lenet,3,3,,,33,100,98,,",
        "ring,lenet,2,2,,,64,256,98,,2",
        header=COUNTS + ",accumulate",
    )
    assert (even.workers, even.global_batch, rounded.global_batch, passes.global_batch) == (2, 128, 100, 256)


def test_passes_of_a_step_count_in_its_batch(tmp_path: Path) -> None:
    """A step of four passes over 64 samples is 256 samples: they were 64, and a throughput four times too small."""
    header = "strategy,model,nodes,ranks,batch_per_rank,global_batch,accumulate,step_seconds"
    by_worker, by_step = rows(tmp_path, "ring,lenet,2,2,64,,4,8", "ring,lenet,2,2,,512,4,8", header=header)
    assert (by_worker.global_batch, by_worker.images_per_second) == (512, 64)
    assert (by_step.batch_per_rank, by_step.images_per_second) == (64, 64)


def test_a_table_whose_first_line_is_no_header_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its first line must name the columns, such as strategy,model,") as caught:
        rows(tmp_path, HEADER, header="# what we measured")
    assert len(caught.value.problems) == 1


def test_a_number_cut_in_two_by_its_decimal_comma_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"old\.csv:2: 9 cells for 8 columns; write numbers with a point"):
        rows(tmp_path, "weak,ring,lenet,1,1,32,1,52,1")
    (run,) = rows(tmp_path, "weak,ring,lenet,1,1,32,1,52.1,,", header=HEADER + ",,")  # empty columns of a spreadsheet
    assert run.images_per_second == 52.1


@pytest.mark.parametrize(("header", "complaint"), [
    (HEADER + ",images_per_second", "column 'images_per_second' comes twice"),
    (HEADER + ",learning_rate,learning-rate", "column 'learning_rate' comes twice"),
    (HEADER.replace(",", ";"), "';' separates its columns"),
])  # fmt: skip
def test_a_header_that_can_be_read_in_two_ways_is_refused(tmp_path: Path, header: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        rows(tmp_path, "weak,ring,lenet,1,1,32,1,50,60,70", header=header)


@pytest.mark.parametrize(("column", "value", "complaint"), [
    ("accuracy", "97.2", "97.2 is no share from 0 to 1; for 97.2 % write 0.972"),
    ("accuracy", "-0.1", "-0.1 is no share from 0 to 1"),
    ("seconds_total", "-5", "-5 is negative"),
])  # fmt: skip
def test_results_that_cannot_be_are_refused(tmp_path: Path, column: str, value: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"{column}: {complaint}"):
        rows(tmp_path, f"weak,ring,lenet,1,1,32,1,50,{value}", header=f"{HEADER},{column}")


def test_parts_longer_than_the_step_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_text(f"{HEADER},compute_seconds\nweak,ring,lenet,1,1,32,1,64,450\nweak,ring,lenet,1,1,32,2,64,0.4\n")
    assert any("parts of a step are longer than the step" in line and "old.csv:2;" in line
               for line in read_csv(path).remarks)  # fmt: skip


def test_parts_in_another_unit_than_the_step_are_reported(tmp_path: Path) -> None:
    """A step in milliseconds beside parts in seconds was reported as 99.9 % other, without a word."""
    path = tmp_path / "old.csv"
    path.write_text(f"{HEADER},compute_seconds\nweak,ring,lenet,1,1,32,1,64,0.0004\nweak,ring,lenet,1,1,32,2,64,0.4\n")
    (remark,) = read_csv(path).remarks
    assert "computing is less than 2 % of a step" in remark and "old.csv:2;" in remark


@pytest.mark.parametrize("line", ["mean,lenet,1,1,32,,74", "ring,TOTAL,1,1,32,,74", "ring,lenet,1,1,32,std,0.8"])
def test_rows_that_sum_up_others_are_refused(tmp_path: Path, line: str) -> None:
    """A row of means counted as one more run, which made intervals too narrow."""
    with pytest.raises(ConfigError, match="is no run; delete rows that sum up others"):
        rows(tmp_path, "weak,ring,lenet,1,1,32,1,75", f"weak,{line}")


SHORT = "strategy,model,nodes,ranks,batch_per_rank,images_per_second"


def remarks(tmp_path: Path, *lines: str, header: str = SHORT) -> str:
    path = tmp_path / "old.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return " | ".join(read_csv(path).remarks)


@pytest.mark.parametrize("first", ["sep=,\n", '"sep=,"\r\n', ""])
def test_a_header_of_a_spreadsheet_is_read_and_lines_keep_their_numbers(tmp_path: Path, first: str) -> None:
    path = tmp_path / "old.csv"
    path.write_text(f"{first}{SHORT.upper()}\nring,lenet,1,1,32,99.5\n")
    (run,) = read_csv(path).runs
    assert (run.strategy, run.images_per_second) == ("ring", 99.5)
    assert run.name == f"old.csv:{3 if first else 2}"


def test_copies_of_a_measurement_are_reported(tmp_path: Path) -> None:
    measured = [f"ring,lenet,{n},{n},32,{99.512 * n:.3f}" for n in (1, 2)]
    assert "2 rows with exactly the numbers of an earlier row" in remarks(tmp_path, *measured, *measured)
    assert not remarks(tmp_path, *measured)
    rounded = ["ring,lenet,1,1,32,99.5", "ring,lenet,1,1,32,99.5"]
    assert not remarks(tmp_path, *rounded)


def test_one_name_in_several_spellings_is_reported(tmp_path: Path, ask_hpcdl: CommandLine) -> None:
    lines = ["ring,ResNet-50,1,1,32,99.5", "ring,resnet50,2,2,32,199.5"]
    assert "model is written in several ways, each taken for another one: ResNet-50, resnet50" in remarks(
        tmp_path, *lines
    )
    reported = ask_hpcdl(["report", "--import", "csv", tmp_path / "old.csv", "--out", tmp_path / "out"])
    assert "no two sizes have the same other settings" in reported.out and "the same size" not in reported.out


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("images_per_second", (50.0, 48.0, 45.0), "hardly grows for ring lenet from 1 to 4 workers (x 0.9)"),
        ("images_per_second", (1.28, 1.34, 1.4), "call a time step_seconds"),
        ("step_seconds", (640.0, 650.0, 660.0), "if these are milliseconds"),
        ("step_seconds", (0.64, 0.65, 660.0), "steps jump by a factor of 1,015"),
        ("images_per_second", (50.0, 98.0, 100.0), ""),
        ("step_seconds", (85.0, 86.0, 90.0), "the median step takes 86 s, 0.37 samples a second of a worker"),
        ("step_seconds", (0.64, 0.65, 0.9), ""),
    ],
)
def test_numbers_in_another_unit_are_reported(
    tmp_path: Path, column: str, values: tuple[float, ...], words: str
) -> None:
    header = SHORT.replace("images_per_second", column)
    lines = [f"ring,lenet,{n},{n},32,{value}" for n, value in zip((1, 2, 4), values, strict=True)]
    reported = remarks(tmp_path, *lines, header=header)
    assert words in reported if words else not reported, reported


@pytest.mark.parametrize(
    ("header", "batches", "words"),
    [
        ("batch_per_rank,step_seconds", (32, 64, 128), "is 32 x workers in all rows"),
        ("batch_per_rank,step_seconds", (32, 64, 64), ""),
        ("global_batch,step_seconds", (32, 64, 128), ""),
        ("global_batch,step_seconds", (32, 32, 32), "if it is the batch of one, call it batch_per_rank"),
    ],
)
def test_a_batch_of_the_other_kind_is_asked_about(
    tmp_path: Path, header: str, batches: tuple[int, ...], words: str
) -> None:
    lines = [f"ring,lenet,{n},{n},{batch},0.6{n}" for n, batch in zip((1, 2, 4), batches, strict=True)]
    reported = remarks(tmp_path, *lines, header=f"strategy,model,nodes,ranks,{header}")
    assert words in reported if words else not reported, reported


@pytest.mark.parametrize(
    ("ranks", "rates", "reported"),
    [
        ((4, 4, 4), (400, 790, 1570), True),
        ((4, 8, 16), (400, 790, 1570), False),
        ((4, 4, 4), (400, 480, 520), False),
        ((4, 4), (400, 790), False),
    ],
)
def test_ranks_that_seem_those_of_a_node_are_asked_about(
    tmp_path: Path, ranks: tuple[int, ...], rates: tuple[int, ...], reported: bool
) -> None:
    lines = [f"ring,lenet,{2**i},{num},32,{rate}" for i, (num, rate) in enumerate(zip(ranks, rates, strict=True))]
    words = "grows from 1 to 4 nodes (x 3.9) with 4 ranks in all rows"
    assert (words in remarks(tmp_path, *lines)) is reported


@pytest.mark.parametrize(
    ("mode", "column", "batches", "words"),
    [
        ("strong", "batch_per_rank", (32, 32, 32), "is called strong scaling, but its batch of a worker is 32 at all"),
        ("weak", "global_batch", (128, 128, 128), "is called weak scaling, but its global batch is 128 at all sizes"),
        ("strong", "batch_per_rank", (128, 64, 32), ""),
        ("weak", "batch_per_rank", (32, 32, 32), ""),
        ("", "batch_per_rank", (32, 32, 32), ""),
    ],
)
def test_a_mode_that_is_not_the_batch_that_stays_is_asked_about(
    tmp_path: Path, mode: str, column: str, batches: tuple[int, ...], words: str
) -> None:
    lines = [f"{mode},ring,lenet,{n},{n},{batch},{99.5 * n}" for n, batch in zip((1, 2, 4), batches, strict=True)]
    reported = remarks(tmp_path, *lines, header=f"mode,strategy,model,nodes,ranks,{column},images_per_second")
    assert words in reported if words else not reported, reported


def test_throughputs_say_the_unit_of_long_steps(tmp_path: Path) -> None:
    lines = [f"ring,lenet,{n},{n},32,{85.0 + n},{32 * n / (85.0 + n)}" for n in (1, 2, 4)]
    assert not remarks(
        tmp_path, *lines, header=f"{SHORT.replace('images_per_second', 'step_seconds')},images_per_second"
    )


def test_servers_that_no_column_counts_are_reported(tmp_path: Path) -> None:
    """Rows of `ps` without workers and servers had 148 % efficiency: the server counted as a worker, silently."""
    lines = [f"ps,resnet50,{n},{n},64,{50 * (n - 1)}" for n in (2, 3, 5)]
    assert "ps has servers, and no column says how many of the ranks" in remarks(tmp_path, *lines)
    assert "servers" not in remarks(tmp_path, *(line.replace("ps", "ring", 1) for line in lines))
    counts = "strategy,model,nodes,ranks,workers,servers,batch_per_rank,images_per_second"
    assert "no column" not in remarks(tmp_path, "ps,resnet50,2,2,1,1,64,50", header=counts)
    assert all(bool(WITH_SERVERS.fullmatch(name)) == has_servers(name) for name in STRATEGIES)


def test_an_imported_accuracy_is_not_called_one_of_training(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text(f"{SHORT},accuracy\nring,lenet,1,1,32,50,0.9\nring,lenet,2,2,32,98,0.9\n")
    reported = ask_hpcdl(["report", "--import", "csv", tmp_path / "old.csv", "--out", tmp_path / "out"])
    assert "Accuracy: 90.0 % on samples that the imported table does not name" in " ".join(reported.out.split()), (
        reported.out
    )
    assert "imported accuracy: 90.00 %" in reported.out and "training samples" not in reported.out


def test_epochs_of_different_sizes_are_reported(tmp_path: Path) -> None:
    lines = ("ring,resnet50,1,1,64,50,25600", "ring,resnet50,2,2,64,98,100")
    header = f"{SHORT},seconds_per_epoch"
    assert "an epoch would have 9,800 to 1,280,000 samples" in remarks(tmp_path, *lines, header=header)
    assert not remarks(tmp_path, lines[0], lines[1].replace("100", "13000"), header=header)


def test_totals_of_another_unit_are_reported(tmp_path: Path) -> None:
    """Node-hours of one row were a thousandth of those beside it, without a word."""
    header = f"{SHORT},seconds_total"
    hours = ("ring,resnet50,1,1,64,50,90000", "ring,resnet50,4,4,64,190,6.5")
    assert "seconds_total of resnet50 differ by a factor of 3,644" in remarks(tmp_path, *hours, header=header)
    same_steps = ("ring,resnet50,1,1,64,50,900", "ring,resnet50,256,256,64,12000,960")
    same_epochs = ("ring,resnet50,1,1,64,50,90000", "ring,resnet50,256,256,64,12000,375")
    assert not remarks(tmp_path, *same_steps, header=header) and not remarks(tmp_path, *same_epochs, header=header)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("strategy,model,nodes,gpus,batch_per_rank,images_per_second", "call 'gpus' ranks, if it is the number of all"),
        (
            "strategy,model,nodes,ranks,batch_size,images_per_second",
            "call 'batch_size' batch_per_rank, if it is that of",
        ),
        ("strategy,model,nodes,ranks,batch_per_rank,img/sec", "call 'img/sec' images_per_second, if it is the rate of"),
        ("strategy,model,nodes,ranks,batch_per_rank,step time (ms)", "divide 'step time (ms)' by 1,000, and call it"),
        ("strategy,model,nodes,ranks,batch_per_rank,speedup", "'speedup' has no time in it"),
        ("strategy,model,nodes,ranks,batch_per_rank,seconds_per_epoch", "divide the samples of an epoch by it"),
        ("strategy,model,ranks,batch_per_rank,images_per_second", "no column 'nodes'; add it"),
    ],
)
def test_columns_under_other_names_are_told_of(header: str, said: str, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"{header}\n{','.join('1' for _ in header.split(','))}\n")
    with pytest.raises(ConfigError) as caught:
        read_csv(table)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("column", "stated", "said"),
    [
        ("efficiency", "1 0.95 0.79", "efficiency is 79.0 % where its throughputs give 87.5 %"),
        ("Efficiency (%)", "100 95 79", "efficiency is 79.0 % where its throughputs give 87.5 %"),
        ("parallel efficiency", "92% 87.4% 80.5%", "efficiency is 0.92 x the report's at all sizes"),
        ("speed-up", "1 1.9 3.1", "speedup is 3.10 where its throughputs give 3.50"),
        ("efficiency", "1 0.95 0.875", ""),
        ("efficiency (%)", "100 95 88", ""),
        ("speedup", "4 7.6 14", ""),
        ("speedup", "1x 1.9x 3.5x", ""),
        ("efficiency", "- n/a good", ""),
        ("power efficiency", "3 2 1", ""),
    ],
)
def test_ratios_that_a_table_states_itself_are_compared(column: str, stated: str, said: str, tmp_path: Path) -> None:
    sizes = ("1,4,64,1400", "2,8,64,2660", "4,16,64,4900")
    lines = (f"horovod,resnet50,{size},{ratio}" for size, ratio in zip(sizes, stated.split(), strict=True))
    header = f"strategy,model,nodes,ranks,batch_per_rank,images_per_second,{column}"
    runs = rows(tmp_path, *lines, header=header)
    told = [line for line in caveats(runs, (), build_curves(runs)) if "the table's" in line]
    assert said in "".join(told) and bool(told) == bool(said)


def test_hosts_in_place_of_a_machine_are_asked_about(tmp_path: Path) -> None:
    """Each row was on a curve of its own, and the report had no efficiency."""
    header, sizes = f"{SHORT},machine", ((1, 52), (2, 100), (4, 190))
    hosts = [f"ring,resnet50,{n},{n},64,{rate},node{n}" for n, rate in sizes]
    assert "machine has a value for each size (node1, node2, node4)" in remarks(tmp_path, *hosts, header=header)
    kinds = [f"ring,resnet50,{n},{n},64,{rate * k},p{k}" for n, rate in sizes for k in (3, 4, 5)]
    chips = [f"ring,resnet50,{n},{n},64,{rate},{name}" for (n, rate), name in zip(sizes, "VAH", strict=True)]
    assert not remarks(tmp_path, *kinds, header=header) and not remarks(tmp_path, *chips, header=header)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("interconnect", ("ib", "eth"), "runs with interconnect ib are faster than those with eth at 2 settings"),
        ("fp16", ("yes", "no"), "runs with fp16 yes are faster than those with no at 2 settings"),
        ("jobid", (), ""),
        ("date", ("monday", "tuesday"), ""),
    ],
)
def test_columns_that_divide_repeats_are_asked_about(
    column: str, values: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """Runs over two networks became one mean, with the difference as its scatter."""
    names = {0: values[0], 1: values[1]} if values else {}
    slower = 0.6 if said else 0.99
    lines = [
        f"ring,resnet50,{n},{n},64,{50 * n * (slower if kind and n > 1 else 1) + repeat / 10},"
        + names.get(kind, f"{n}{kind}{repeat}")
        for n in (1, 2, 4)
        for kind in (0, 1)
        for repeat in (0, 1)
    ]
    told = [
        line
        for line in remarks(tmp_path, *lines, header=f"{SHORT},{column}").split(" | ")
        if "and are averaged" in line
    ]
    assert said in "".join(told) and len(told) == bool(said)
