"""Each table is written as CSV and LaTeX, and figures fit a paper's column."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from hpcdl.report.document import Bounds, Column, Document, Interval, Section, Table
from hpcdl.report.renderers import RENDERERS
from tests.conftest import ROOT, CommandLine

STUDY = ROOT / "docs" / "example-report" / "study"
HOSTILE = Table(
    title="50 % of \\input{x}",
    columns=[Column(name="a_b"), Column(name="share", kind="percent"), Column(name="time", kind="seconds")],
    rows=[
        ["=1+1 & #_{}$^~", Interval(value=0.5, half=0.125, n=3), 0.25],
        ["plain", None, Bounds(value=1.5, low=1.0, high=2.0, n=3)],
    ],
    note="100 % & more",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of both renderers for a hostile table that occurs twice in a section."""
    place = tmp_path_factory.mktemp("tables")
    (place / "tables").mkdir()
    section = Section(name="cost", title="Cost", items=[HOSTILE, HOSTILE])
    document = Document(title="t", summary=[], warnings=[], sections=[section], data={})
    for form in ("csv", "latex"):
        RENDERERS.load(form)(document, place, {})
    return place / "tables"


def test_each_table_has_files_of_its_own(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"cost-50-of-input-x{more}.{end}" for more in ("--2", "") for end in ("csv", "tex")]


def test_csv_holds_numbers_and_no_formula(folder: Path) -> None:
    header, first, second = csv.reader((folder / "cost-50-of-input-x.csv").read_text().splitlines())
    assert header == ["a_b", "share", "share ±", "time (s)", "time (s) low", "time (s) high"]
    assert first == ["'=1+1 & #_{}$^~", "0.5", "0.125", "0.25", "", ""]
    assert second == ["plain", "", "", "1.5", "1.0", "2.0"]


def test_latex_prints_what_the_page_shows(folder: Path) -> None:
    lines = (folder / "cost-50-of-input-x.tex").read_text().splitlines()
    rows = [line for line in lines if line.endswith(r"\\")]
    assert rows[1] == (
        r"=1+1 \& \#\_\{\}\$\textasciicircum{}\textasciitilde{} & 50.0 $\pm$ 12.5 \% & 250 ms \\"
    )  # fmt: skip
    assert all(len(re.findall(r"(?<!\\)&", row)) == 2 for row in rows) and rows[2].startswith("plain & -- & ")
    assert [line for line in lines if re.match(r"\\(top|mid|bottom)rule$", line)] == [
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
    ]


@pytest.mark.long
def test_a_report_writes_them_as_wide_as_a_column(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    line = ["report", STUDY, "--out", tmp_path / "out", "--format", "csv,latex", "--figures", "--figure-width", "one"]
    reported = ask_hpcdl(line)
    assert reported.code == 0, reported.err
    tables = {path.stem for path in (tmp_path / "out" / "tables").glob("*.csv")}
    assert len(tables) > 10 and tables == {path.stem for path in (tmp_path / "out" / "tables").glob("*.tex")}
    with Image.open(tmp_path / "out" / "figures" / "strong-efficiency.png") as picture:
        assert abs(picture.width / 200 * 25.4 - 89) < 1  # 200 dots per inch


@pytest.fixture
def latex() -> str:
    return str(shutil.which("pdflatex"))


@pytest.mark.lab
def test_latex_itself_reads_every_table(latex: str, folder: Path, ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    reported = ask_hpcdl(["report", STUDY, "--out", tmp_path / "out", "--format", "latex"])
    assert reported.code == 0, reported.err
    tables = tmp_path / "out" / "tables"
    shutil.copy(folder / "cost-50-of-input-x.tex", tables)
    odd = tmp_path / "odd.csv"
    rows = [f"[a]_b%c&d#e$f~g^h\\i{{j,*,{n},{n},64,{rate}" for n, rate in ((1, 50), (2, 96), (4, 170), (8, 300))]
    odd.write_text("\n".join(["strategy,model,nodes,ranks,batch_per_rank,images_per_second", *rows]) + "\n")
    reported = ask_hpcdl(["report", "--import", "csv", odd, "--out", tmp_path / "odd", "--format", "latex"])
    assert reported.code == 0, reported.err
    laws = (tmp_path / "odd" / "tables" / "fits-fitted-laws.tex").read_text()
    assert r"$\sigma$ (contention)" in laws and "\n{[}a]" in laws
    for path in (tmp_path / "odd" / "tables").glob("*.tex"):
        shutil.copy(path, tables / f"odd-{path.name}")
    names = sorted(path.name for path in tables.glob("*.tex"))
    text = [
        r"\documentclass{article}",
        r"\usepackage[utf8]{inputenc}",
        r"\usepackage{booktabs,graphicx}",
        r"\begin{document}",
        *(rf"\resizebox{{\textwidth}}{{!}}{{\input{{{name}}}}}" "\n" for name in names),
        r"\end{document}",
    ]
    (tables / "all.tex").write_text("\n".join(text))
    line = [latex, "-halt-on-error", "-interaction=nonstopmode", "all.tex"]
    done = subprocess.run(line, cwd=tables, capture_output=True, check=False)
    assert len(names) > 10 and done.returncode == 0, done.stdout[-2000:].decode(errors="replace")
    assert (tables / "all.pdf").stat().st_size > 10_000


@pytest.mark.parametrize("width", ["20", "three", "nan", "1e9"])
def test_what_is_no_width_is_refused(ask_hpcdl: CommandLine, tmp_path: Path, width: str) -> None:
    refused = ask_hpcdl(["report", STUDY, "--out", tmp_path / "out", "--figures", "--figure-width", width])
    assert refused.code == 2 and "type one, two, or 50 to 400 millimetres" in refused.err
    assert not (tmp_path / "out").exists()


def test_a_width_needs_figures(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    refused = ask_hpcdl(["report", STUDY, "--out", tmp_path / "out", "--figure-width", "one"])
    assert refused.code == 2 and "add --figures" in refused.err


def test_a_report_written_again_leaves_nothing_of_the_earlier_one(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    """Writing a report again removes the files of the old listing, but keeps changed, added and unlisted files."""
    out, all_runs = tmp_path / "out", sorted((STUDY / "runs").iterdir())
    ring = [str(path) for path in all_runs if "ring-1w" in path.name]
    assert ask_hpcdl(["report", str(STUDY), "--out", str(out), "--format", "md,csv"]).code == 0
    earlier = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {"report.md", "figures/time-lost.svg", "tables/strategies-verdicts.csv"} <= earlier
    (out / "figures" / "mine.svg").write_text("mine")
    (out / "tables" / "strategies-verdicts.csv").write_text("changed")
    again = ask_hpcdl(["report", *ring, "--out", str(out), "--format", "csv"])
    assert again.code == 0, again.err
    left = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert left & {"report.md", "figures/time-lost.svg"} == set()
    assert {"figures/mine.svg", "tables/strategies-verdicts.csv"} <= left
    assert "tables/time-seconds-of-a-step.csv" in left
    (out / ".hpcdl-report.json").write_text('{"files": ["figures/mine.svg"]}')
    refused = ask_hpcdl(["report", *ring, "--out", str(out), "--format", "csv"])
    assert refused.code == 2 and ".hpcdl-report.json" in refused.err and (out / "figures" / "mine.svg").exists()
