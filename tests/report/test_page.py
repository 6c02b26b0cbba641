"""A real browser opens the page: no error on its console, nothing fetched, and something to see, light and dark."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from hpcdl.report.analysis import analyse
from hpcdl.report.build import compose, render
from hpcdl.report.references import load_references
from hpcdl.report.sources import gather
from tests.report.synthetic import weak_study

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--v=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(need: Callable[..., None]) -> str:
    found = shutil.which("chromium")
    need(found is not None, "chromium is not installed: apt-get install chromium")
    return found or ""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    study = analyse(gather([weak_study(folder / "study", efficiency=0.8)]), references=load_references())
    render(compose(study), folder / "report", ["html"])
    return folder / "report" / "report.html"


def shoot(browser: str, page: Path, folder: Path, width: int, *flags: str) -> tuple[Image.Image, str]:
    """A picture of the page `width` pixels wide, and what the browser wrote to its console."""
    picture = folder / "shot.png"
    finished = subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2400",
         f"--screenshot={picture}", *flags, page.as_uri()],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    console = "\n".join(line for line in finished.stderr.splitlines() if ":CONSOLE" in line)
    return Image.open(picture).convert("RGB"), console


@pytest.mark.lab
@pytest.mark.parametrize(
    ("width", "flags", "dark"), [(1100, (), False), (1100, ("--force-dark-mode",), True), (500, (), False)]
)
def test_browser_shows_the_page(
    browser: str, report: Path, tmp_path: Path, width: int, flags: tuple[str, ...], dark: bool
) -> None:
    picture, console = shoot(browser, report, tmp_path, width, *flags)
    assert console == ""
    assert picture.width == width
    corner = picture.getpixel((2, 2))
    assert isinstance(corner, tuple)
    assert (sum(corner[:3]) < 384) == dark
    assert len(picture.getcolors(2**24) or ()) > 50, "the page is blank"


@pytest.mark.lab
def test_browser_console_is_really_read(browser: str, tmp_path: Path) -> None:
    """The check above can fail: a page that is not allowed to load a picture says so on the console."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
        "<img src='https://example.invalid/x.png'>"
    )
    _, console = shoot(browser, page, tmp_path, 500)
    assert "Content Security Policy" in console
