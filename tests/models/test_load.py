"""From a spec to a model: accepted forms of users' functions, and messages about their mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import pytest

from hpcdl.core.errors import UsageError
from hpcdl.models.load import load_model

EXAMPLE = Path(__file__).resolve().parents[2] / "share" / "hpcdl" / "examples" / "my_model.py"
START = "import keras\nfrom keras import layers\n"
SEQUENTIAL = "keras.Sequential([layers.Flatten(), layers.Dense({})])"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "net.py"


def built(file: Path, body: str, **arguments: object) -> keras.Model:
    file.write_text(START + body)
    return load_model(f"{file}:build", **arguments)  # type: ignore[arg-type]


def refusal(file: Path, body: str, **arguments: object) -> str:
    with pytest.raises(UsageError) as caught:
        built(file, body, **arguments)
    message = str(caught.value)
    assert "\n" not in message and "net.py" in message
    return message


def test_the_example_is_a_model() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 15
    model = load_model(f"{EXAMPLE}:build", classes=3, input_shape=(28, 28, 1))
    assert model.output_shape == (None, 3)
    assert load_model(f"{EXAMPLE}:build").output_shape == (None, 10)


@pytest.mark.parametrize(
    "signature",
    ["num_classes, input_shape", "*, num_classes, input_shape", "input_shape, num_classes=9", "num_classes, **rest"],
)
def test_arguments_go_to_those_who_name_them(file: Path, signature: str) -> None:
    body = f"def build({signature}):\n    return {SEQUENTIAL.format('num_classes')}\n"
    assert built(file, body, classes=4, input_shape=(5, 6, 1)).output_shape == (None, 4)


def test_a_function_without_arguments_that_fits_the_data(file: Path) -> None:
    body = f"def build():\n    return {SEQUENTIAL.format(4)}\n"
    model = built(file, body, classes=4, input_shape=(5, 6, 1))
    assert model.input_shape == (None, 5, 6, 1) and model.count_params() == 31 * 4


def test_a_model_of_another_size_than_the_data_is_refused(file: Path) -> None:
    body = f"def build():\n    return {SEQUENTIAL.format(4)}\n"
    assert "shape (4,), but 10 classes need (10,)" in refusal(file, body, classes=10, input_shape=(5, 6, 1))
    fixed = "def build():\n    return keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(2)])\n"
    assert "takes samples of (8, 8, 3), but the data has (5, 6, 1)" in refusal(file, fixed, input_shape=(5, 6, 1))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def build():\n    keras.Input((3,))\n", "returned None (is there a `return`?)"),
        ("def build():\n    return 3\n", "an object of type int, not a Keras model"),
        ("build = 3\n", "is not a function but int"),
        ("def build(depth):\n    return depth\n", "needs the argument 'depth'"),
        ("def build(num_classes):\n    return 1\n", "needs num_classes"),
        ("def build():\n    return 1 / 0\n", "net.py:4: ZeroDivisionError: division by zero"),
        ("def build():\n    return layers.Dense(-1)\n", "net.py:4: ValueError"),
        ("def build():\n    raise KeyError\n", "net.py:4: KeyError: no details"),
        ("def build():\n    return\nimport no_such_thing\n", "net.py:5: ModuleNotFoundError"),
        ("def build():\n    return\nraise SystemExit(3)\n", "net.py:5: SystemExit: 3"),
        ("def build(:\n", "net.py:3: SyntaxError"),
        ("def other():\n    return\n", "unknown model function"),
        (f"def build():\n    return {SEQUENTIAL.format(4)}\n", "has no weights yet"),
    ],
)
def test_mistakes_are_reported_in_one_line(file: Path, body: str, expected: str) -> None:
    assert expected in refusal(file, body)


def test_a_failing_file_leaves_no_module_behind(file: Path) -> None:
    refusal(file, "raise ValueError('no')\n")
    assert "hpcdl_user_model_net" not in sys.modules


def test_a_file_named_like_a_module_replaces_none(tmp_path: Path) -> None:
    import json

    file = tmp_path / "json.py"
    file.write_text(START + f"def build(num_classes):\n    return {SEQUENTIAL.format('num_classes')}\n")
    load_model(f"{file}:build", classes=2, input_shape=(2, 2, 1))
    assert sys.modules["json"] is json


def test_a_module_comes_from_the_path_and_not_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "usernets"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text(
        START + f"def build(num_classes):\n    return {SEQUENTIAL.format('num_classes')}\n"
    )
    (package / "broken.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no module 'usernets\.nets'.*PYTHONPATH"):
        load_model("usernets.nets:build", classes=2, input_shape=(2, 2, 1))
    monkeypatch.syspath_prepend(tmp_path)
    assert load_model("usernets.nets:build", classes=2, input_shape=(2, 2, 1)).output_shape == (None, 2)
    with pytest.raises(UsageError, match=r"broken.py:1: ModuleNotFoundError: No module named 'no_such_thing'; install"):
        load_model("usernets.broken:build")
