"""What pyproject.toml cannot say: share/hpcdl and docs/ become part of the package, so that a wheel works alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from setuptools import find_packages, setup

SHIPPED = {
    "hpcdl.share": Path("share/hpcdl"),
    "hpcdl.share.docs": Path("docs"),
    "hpcdl.share.docs.html": Path("build/site"),
}
LEFT_OUT = ("docs/example-report/study", "docs/example-evidence/study", "docs/conf.py")
"""Of pages: the runs behind the examples, and what builds the site."""


def files(folder: Path) -> Iterator[str]:
    """The files below `folder`, as package data names them."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and not str(path).startswith(LEFT_OUT):
            yield str(path.relative_to(folder))


shipped = {package: folder for package, folder in SHIPPED.items() if folder.is_dir()}
setup(
    include_package_data=False,  # what is shipped stands below, MANIFEST.in says what an sdist holds
    packages=[*find_packages(include=["hpcdl", "hpcdl.*"]), *shipped],
    package_dir={package: str(folder) for package, folder in shipped.items()},
    package_data={"hpcdl": ["py.typed", "*.pyi", "**/*.css"], **{name: [*files(at)] for name, at in shipped.items()}},
)
