"""A real browser opens the page without console errors or network requests, and draws it: light, dark, on a phone and
on paper. The page is that of docs/example-report, and its pictures are those of README.md.

HPCDL_SCREENSHOTS=DIR keeps the pictures in DIR; README.md shows those in docs/images.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import ROOT

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--v=0",
)  # fmt: skip
PAGE = ROOT / "docs" / "example-report" / "report" / "report.html"
IMAGES = ROOT / "docs" / "images"
KEEP = os.environ.get("HPCDL_SCREENSHOTS")  # read at import, as tests run without the caller's variables
PHONE = 390
PICTURES = {
    "report-summary": ("summary", 1100, 900, (), False),
    "report-scaling": ("strong", 800, 490, (), False),
    "report-dark": ("time", 800, 490, ("--force-dark-mode",), True),
    "report-narrow": ("summary", 500, 900, (), False),
}
"""Section, width, height, flags, and whether the page is dark; 500 is the narrowest window that Chromium opens."""


@pytest.fixture(scope="module")
def browser() -> str:
    return str(shutil.which("chromium"))


def visit(browser: str, page: Path, folder: Path, *flags: str) -> tuple[str, str]:
    """Return what the browser prints, and what the page wrote to its console."""
    finished = subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, page.as_uri()],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    console = "\n".join(line for line in finished.stderr.splitlines() if ":CONSOLE" in line)
    return finished.stdout, console


@pytest.mark.lab
@pytest.mark.parametrize("name", PICTURES)
def test_browser_shows_the_page(browser: str, tmp_path: Path, name: str) -> None:
    section, width, height, flags, dark = PICTURES[name]
    shot, frame = tmp_path / "shot.png", tmp_path / "frame.html"
    # Headless Chromium draws nothing of a page that is scrolled itself, but it draws a scrolled page in a frame.
    style = f"border:0;width:{width}px;height:{height}px;display:block"
    where = "" if section == "summary" else f"#{section}"
    frame.write_text(f"<body style='margin:0'><iframe style='{style}' src='{PAGE.as_uri()}{where}'></iframe>")
    size = (f"--window-size={width},{height}", "--virtual-time-budget=4000")
    _, console = visit(browser, frame, tmp_path, *size, f"--screenshot={shot}", *flags)
    assert console == ""
    with Image.open(shot) as opened:
        picture = opened.convert("RGB")
    assert picture.size == (width, height)
    corner = picture.getpixel((2, 2))
    assert isinstance(corner, tuple)
    assert (sum(corner[:3]) < 384) == dark
    assert len(picture.getcolors(2**24) or ()) > 50, "the page is blank"
    if KEEP:
        picture.quantize(256).save(Path(KEEP) / f"{name}.png", optimize=True)


@pytest.mark.lab
def test_nothing_sticks_out_on_a_phone(browser: str, tmp_path: Path) -> None:
    """The page is as wide as the phone; wider content (tables) scrolls in its own box."""
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"<iframe id=page style='width:{PHONE}px;height:800px;border:0' src='{PAGE.as_uri()}'></iframe><script>"
        "page.onload = () => { const all = page.contentDocument; document.title = [all.documentElement.scrollWidth,"
        " Math.max(...[...all.querySelectorAll('p,h1,h2,li,figure,svg')]"
        ".map(item => item.getBoundingClientRect().right)), all.querySelectorAll('svg').length].join(' ') }</script>"
    )
    flags = ("--allow-file-access-from-files", "--virtual-time-budget=8000", "--dump-dom")
    shown, console = visit(browser, frame, tmp_path, *flags)
    assert console == ""
    found = re.search(r"<title>([\d.]+) ([\d.]+) (\d+)</title>", shown)
    assert found, shown[:300]
    assert int(found[1]) == PHONE and float(found[2]) <= PHONE and int(found[3]) > 3, found[0]


@pytest.mark.lab
def test_the_page_prints(browser: str, tmp_path: Path) -> None:
    paper = tmp_path / "report.pdf"
    _, console = visit(browser, PAGE, tmp_path, f"--print-to-pdf={paper}", "--force-dark-mode")
    assert console == ""
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes())) <= 40


@pytest.mark.lab
def test_browser_console_is_really_read(browser: str, tmp_path: Path) -> None:
    """The checks can fail: a page that may not load a picture reports this on the console."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
        "<img src='https://example.invalid/x.png'>"
    )
    _, console = visit(browser, page, tmp_path, f"--screenshot={tmp_path / 'shot.png'}")
    assert "Content Security Policy" in console


def test_the_pictures_of_the_readme_are_these() -> None:
    names = set(re.findall(r"docs/images/([\w-]+)\.png", (ROOT / "README.md").read_text()))
    assert names and names <= PICTURES.keys()
    for name in names:
        with Image.open(IMAGES / f"{name}.png") as picture:
            assert picture.size == PICTURES[name][1:3]
        assert (IMAGES / f"{name}.png").stat().st_size < 250_000
