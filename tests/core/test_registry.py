import pytest

from hpcdl.core.errors import UnknownNameError
from hpcdl.core.registry import Entry, Registry

TABLE = Registry(
    "shape", {"circle": Entry(target="math:pi", summary="round"), "square": Entry(target="x:y", summary="-")}
)


def test_a_name_is_imported_when_it_is_chosen() -> None:
    assert TABLE.load("circle") == pytest.approx(3.14159, abs=1e-5)
    assert list(TABLE) == ["circle", "square"]
    assert "triangle" not in TABLE


def test_an_unknown_name_gets_the_nearest_and_all_known() -> None:
    with pytest.raises(
        UnknownNameError, match="unknown shape 'circel'; did you mean 'circle'\\? known: circle, square"
    ):
        TABLE.entry("circel")
