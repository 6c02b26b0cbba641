"""No string of a record becomes markup, a terminal command or a spreadsheet formula."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.core.pages.page import sentence
from hpcdl.core.records.run_record import PARTS as RECORD_PARTS
from hpcdl.report.analysis.analyse import analyse
from hpcdl.report.compose.build import compose, render, with_own_colors
from hpcdl.report.document import (
    Bounds,
    Column,
    Document,
    Figure,
    Interval,
    Section,
    Series,
    Table,
    cell_text,
    number,
    plain,
    shortened,
)
from hpcdl.report.renderers import RENDERERS
from hpcdl.report.renderers.data import neutral
from hpcdl.report.renderers.figures import svg
from hpcdl.report.renderers.markdown import escaped as markdown_escaped
from hpcdl.report.runs.sources import Gathered
from tests.report.synthetic import as_run, make_record

SCRIPT = "<script>alert(1)</script>"
FORMULA = '=HYPERLINK("http://evil","x")'
TERMINAL = "\x1b]0;owned\x07\x1b[31m\u202egnp"
LINK = "[x](javascript:alert(1)) ![y](http://evil/z.png) $a_b$ _under"


@pytest.fixture(scope="module")
def document() -> Document:
    records = [
        make_record(n, 100.0 * n + repeat, strategy=strategy, model=FORMULA, data=LINK, machine=TERMINAL)
        for n in (1, 2)
        for repeat in range(2)
        for strategy in (SCRIPT, "ring")
    ]
    records.append(make_record(1, None, status="failed", message=SCRIPT + TERMINAL + LINK, strategy="-bad"))
    runs = tuple(as_run(record, f"{SCRIPT}{number}") for number, record in enumerate(records))
    return compose(analyse(Gathered(runs=runs, unreadable=(TERMINAL,))))


@pytest.fixture(scope="module")
def folder(document: Document, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    render(document, out, ["html", "md", "csv", "json"])
    return out


@pytest.mark.parametrize("name", RENDERERS)
def test_a_form_has_no_control_codes_and_is_the_same_twice(
    document: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    texts = []
    for place in (tmp_path / "one", tmp_path / "two"):
        render(document, place, [name])
        written = [path.read_text() for path in sorted(place.rglob("*")) if path.is_file()]
        texts.append(capsys.readouterr().out.replace(str(place), "") + "".join(written))
    assert "ring" in texts[0] and texts[0] == texts[1]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", texts[0].replace("\r\n", "\n"))


class Page(HTMLParser):
    """Collect tags, attributes and ids of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    found = Page()
    found.feed((folder / "report.html").read_text())
    return found


def test_page_has_no_script_and_no_handler(page: Page, folder: Path) -> None:
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert SCRIPT not in (folder / "report.html").read_text()


def test_page_needs_no_network(page: Page) -> None:
    addresses = [
        value or "" for name, value in page.attributes if name in ("src", "href", "xlink:href", "data", "action")
    ]
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)


def test_page_has_unique_ids_and_every_link_has_its_target(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    targets = [
        value[1:] for name, value in page.attributes if name in ("href", "xlink:href") and value and value[0] == "#"
    ]
    assert set(targets) <= set(page.ids)


def test_every_figure_is_described_and_backed_by_numbers(page: Page, document: Document, folder: Path) -> None:
    labels = [value for name, value in page.attributes if name == "aria-label" and value]
    for figure in document.figures():
        assert plain(figure.alt) in labels
        assert figure.table.rows
        assert figure.title
    assert page.tags.count("figure") == len(document.figures()) > 0
    assert page.tags.count("svg") == len(document.figures())


def test_markdown_shows_what_was_written(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    assert SCRIPT not in text
    assert "](javascript" not in text
    assert "](http" not in text
    assert "\x1b" not in text
    for link in re.findall(r"!\[[^\n]*?\]\((figures/[^)]+)\)", text):
        assert (folder / link).is_file()


def test_csv_has_no_formula(folder: Path) -> None:
    with (folder / "scaling.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) > 1
    cells = [cell for row in rows for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "@", "+", "\t"))]
    assert f"'{FORMULA}" in cells


def test_json_keeps_strings_as_they_are(folder: Path) -> None:
    document = json.loads((folder / "report.json").read_text())
    assert {row["model"] for row in document["scaling"]} == {FORMULA}


def test_figures_are_well_formed_with_readable_text(document: Document) -> None:
    for figure in document.figures():
        tree = ElementTree.fromstring(svg(figure))
        words = "".join(tree.itertext())
        assert plain(figure.x_label) in words


def test_a_figure_is_drawn_the_same_twice(document: Document) -> None:
    figure = document.figures()[0]
    assert svg(figure) == svg(figure)


@given(st.text())
def test_neutral_text_is_no_formula(text: str) -> None:
    written = io.StringIO()
    csv.writer(written).writerow([neutral(text)])
    (row,) = csv.reader(io.StringIO(written.getvalue()))
    assert not row[0].lstrip().startswith(("=", "+", "-", "@"))


@given(st.text())
def test_markdown_text_has_no_markup(text: str) -> None:
    escaped = markdown_escaped(text)
    assert not re.match(r"\s*(?:[-=+]|\d+\.(?:\s|$))", escaped), "a list, a heading or a rule"
    assert not re.search(r"(?<!\\)(?:\\\\)*\\[^\W_]", escaped), "a backslash that is shown"
    assert "\n" not in escaped
    assert not re.search(r"(?<!\\)(?:\\\\)*[<\[\]|`*#]", escaped)


@pytest.mark.parametrize(
    ("kind", "cell", "text"),
    [
        ("rate", Interval(value=1234.5, half=12.3, n=3), "1,234 ± 12"),
        ("rate", Interval(value=62.9, half=1.31, n=3), "62.9 ± 1.3"),
        ("rate", Interval(value=62.9, half=None, n=1), "62.9 †"),
        ("percent", Interval(value=0.952, half=0.013, n=3), "95.2 ± 1.3 %"),
        ("number", Bounds(value=1.5, low=1.2, high=None), "1.50 [1.20, –]"),
        ("count", 12345, "12,345"),
        ("seconds", 0.0123, "12.3 ms"),
        ("bytes", 2**20, "1 MiB"),
        ("number", float("nan"), "–"),
        ("text", None, "–"),
    ],
)
def test_cells_have_one_spelling(kind: str, cell: object, text: str) -> None:
    assert cell_text(Column(name="x", kind=kind), cell) == text  # type: ignore[arg-type]


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_number_has_a_text(value: float) -> None:
    assert number(value)


@given(st.lists(st.text(alphabet="abc ", max_size=80), max_size=8), st.integers(5, 40))
def test_shortened_labels_still_differ(labels: list[str], most: int) -> None:
    short = shortened(labels, most)
    assert len(set(short)) == len(set(labels))
    assert all(len(text) <= most + 4 for text in short)


def curve(strategy: str, color: int, style: str = "measured") -> Series:
    return Series(label=f"{strategy} {color}", x=[1, 2], y=[1.0, 0.9], color=color, strategy=strategy, style=style)


def test_a_strategy_has_one_colour_in_all_figures() -> None:
    """A strategy keeps its colour in all figures; its second curve and published points have unique colours."""
    table = Table(title="t", columns=(), rows=())

    def section(*series: Series) -> Section:
        figure = Figure(name="f", title="t", alt="a", x_label="x", y_label="y", series=series, table=table)
        return Section(name="s", title="t", items=[figure, table])

    sections = with_own_colors([
        section(curve("ring", 0), curve("ps", 1), curve("", 0, "ideal")),
        section(curve("ps", 0), curve("ps", 0, "fit"), curve("ps", 1), curve("", 4, "published"), curve("ring", 2)),
    ])  # fmt: skip
    first, second = (item for section in sections for item in section.items if isinstance(item, Figure))
    assert [one.color for one in first.series] == [0, 1, 0]
    assert [one.color for one in second.series] == [1, 1, 2, 3, 0]


@pytest.mark.parametrize("style", ["measured", "dots", "published", "line"])
def test_curves_differ_in_more_than_colour(style: str) -> None:
    """Eight curves differ without colours too: by marker, or by dash if they have no markers."""
    series = [
        Series(label="a", x=[1.0], y=[1.0], low=[0.5], high=[1.5], color=color, style=style) for color in range(8)
    ]
    table = Table(title="t", columns=(), rows=())
    drawn = svg(Figure(name="f", title="t", alt="a", x_label="x", y_label="y", series=series, table=table))
    marks = set(re.findall(r'<path id="f-m[^"]+" d="([^"]+)"', drawn))
    assert len(marks) >= (1 if style == "published" else 8)
    assert len(set(re.findall(r"var\(--curve-\d", drawn))) == 8


def test_parts_of_a_bar_differ_in_more_than_colour() -> None:
    names = (*RECORD_PARTS, "late start")
    series = [Series(label=part, x=["a"], y=[0.2], style="stack", part=part) for part in names]
    table = Table(title="t", columns=(), rows=())
    drawn = svg(Figure(name="f", title="t", alt="a", x_label="x", y_label="y", series=series, table=table))
    assert drawn.count("<pattern") == len(names) - 1, "one is plain"
    assert all(f"var(--{part.replace('_', '-').replace(' ', '-')}, " in drawn for part in names)


def test_commands_are_code_whose_flags_stay_whole() -> None:
    shown = sentence("Next: `hpcdl submit --ranks-per-node 2 -- train` & 5 ms")
    flag = "<span>--ranks-per-node</span>"
    assert shown == f"Next: <code>hpcdl submit {flag} 2 -- train</code> &amp; 5&nbsp;ms"
