"""Values of --model are understood, or refused in one line, without importing anything they name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.core.errors import UsageError
from hpcdl.models.table import MODELS, check_model_spec, loss_weights, model_name, parse_spec

EXAMPLE = Path(__file__).resolve().parents[2] / "share" / "hpcdl" / "examples" / "my_model.py"


def refusal(spec: str, **arguments: object) -> str:
    with pytest.raises(UsageError) as caught:
        check_model_spec(spec, **arguments)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", MODELS)
def test_every_name_of_the_table_passes(name: str) -> None:
    check_model_spec(name)
    assert model_name(name) == name


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    message = refusal("lenett")
    assert "did you mean 'lenet'" in message and all(name in message for name in MODELS)
    assert "did you mean 'cifar10-quick'" in refusal("cifar10_quick")


def test_sizes_are_checked_before_anything_is_built() -> None:
    check_model_spec("alexnet", classes=10, input_shape=(67, 80, 1))
    assert "smallest it takes is 67x67" in refusal("alexnet", input_shape=(28, 28, 1))
    assert "-1 classes" in refusal("alexnet", classes=-1)


def test_a_file_passes_and_names_the_model() -> None:
    check_model_spec(f"{EXAMPLE}:build")
    assert model_name(f"{EXAMPLE}:build") == "my_model"
    assert model_name("some/net.py:small") == "net-small"
    assert model_name("a b/$(x).py:build") == "__x_"
    assert model_name("package.nets:build") == "nets"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("my_model.py", "write my_model.py:build"),
        ("./my_model", "write ./my_model:build"),
        (":build", "path/to/file.py:function"),
        ("net.py:", "path/to/file.py:function"),
        ("net.py:bu ild", "path/to/file.py:function"),
        ("no-module:build", "neither a .py file nor a module"),
        ("nowhere/net.py:build", "no file 'nowhere/net.py'"),
        ("no_such_package_here:build", "no module 'no_such_package_here'"),
        ("json.nowhere:build", "no module 'json.nowhere'"),
        ("json.decoder.deeper:build", "no module 'json.decoder.deeper'"),
    ],
)
def test_what_is_refused_and_why(spec: str, expected: str) -> None:
    assert expected in refusal(spec)


@given(st.text(max_size=30))
def test_any_text_is_understood_or_refused(spec: str) -> None:
    try:
        place = parse_spec(spec)
    except UsageError:
        return
    assert place in MODELS or ":" in spec
    assert "/" not in model_name(spec)


@pytest.mark.parametrize(
    ("source", "passes"),
    [
        ("def build(): ...", True),
        ("build = lambda: None", True),
        ("from elsewhere import make as build", True),
        ("from elsewhere import *", True),
        ("if True:\n    def build(): ...", True),
        ("try:\n    from a import build\nexcept ImportError:\n    build = None", True),
        ("def __getattr__(name): ...", True),
        ("def other():\n    build = 1", False),
        ("import build.it as it", False),
        ("class C:\n    def build(self): ...", False),
        ("", False),
    ],
)
def test_the_function_must_be_in_the_file(source: str, passes: bool, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(source)
    if passes:
        check_model_spec(f"{file}:build")
    else:
        assert "unknown model function" in refusal(f"{file}:build")


def test_a_missing_function_is_answered_with_those_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("def built(): ...\ndef _private(): ...\n")
    message = refusal(f"{file}:build")
    assert str(file) in message and "did you mean 'built'" in message and "_private" not in message


def test_a_syntax_error_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("x = 1\ndef build(:\n")
    assert f"{file}:2" in refusal(f"{file}:build")
    file.write_bytes(b"x\0y")
    assert "net.py" in refusal(f"{file}:build")


CHECK = (
    "import sys; from hpcdl.models.table import check_model_spec; check_model_spec(sys.argv[1]); print(*sys.modules)"
)


def test_checking_runs_none_of_the_users_code(tmp_path: Path) -> None:
    package = tmp_path / "mynets" / "deep"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "net.py").write_text("raise SystemExit('imported')\ndef build(): ...")  # deep/ is a namespace package
    for spec in ("mynets.deep.net:build", f"{package / 'net.py'}:build"):
        command = [sys.executable, "-P", "-c", CHECK, spec]
        finished = subprocess.run(
            command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False
        )
        assert finished.returncode == 0, finished.stderr
        assert not {"mynets", "tensorflow", "keras", "numpy"} & set(finished.stdout.split())


def test_loss_weights_of_the_heads() -> None:
    assert loss_weights("googlenet-aux") == (1.0, 0.3, 0.3)
    assert loss_weights("lenet") == (1.0,)
    assert loss_weights("net.py:build") is None


COMMAND = """
import sys, typer
from hpcdl.cli.site import lists as models
app = typer.Typer(rich_markup_mode=None)
app.callback()(lambda: None)
models.register(app)
try:
    app()
finally:
    assert not {"tensorflow", "keras", "numpy", "rich"} & set(sys.modules)
"""


def listing(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, "models", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


def test_the_command_lists_every_model_as_json() -> None:
    listed = {entry["name"]: entry for entry in json.loads(listing("--json").stdout)["models"]}
    assert list(listed) == list(MODELS)
    assert listed["resnet50"] == {
        "name": "resnet50",
        "parameters": 25_557_032,
        "moving_statistics": 53_120,
        "macs": 3_857_973_248,
        "gradient_bytes": 102_228_128,
        "input_shape": [224, 224, 3],
        "classes": 1000,
    }


def test_the_command_lists_every_model_for_people() -> None:
    finished = listing()
    header, *rows = finished.stdout.splitlines()
    assert header.split()[:3] == ["model", "parameters", "MACs"]
    assert [row.split()[0] for row in rows] == list(MODELS)
    assert "143,667,240" in finished.stdout and "next: hpcdl train" in finished.stderr
    assert "Example: hpcdl models" in listing("--help").stdout
