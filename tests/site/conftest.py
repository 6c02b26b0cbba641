"""A small checkout, on which `make install` is quick to test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.site.checkouts import Checkout, copy_checkout


@pytest.fixture(scope="session")
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdl-site-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def checkout(open_folder: Path) -> Checkout:
    """A checkout of version 1.0 in a path with a space."""
    return copy_checkout(open_folder / "check out", "1.0")
