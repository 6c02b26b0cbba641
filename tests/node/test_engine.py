from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.node import engine
from hpcdl.node.engine import find_engine, needed_libraries, slow_precision


def test_the_installed_build_is_recognised_without_importing_it() -> None:
    found = find_engine()
    assert found.package == "tensorflow"
    assert found.version == importlib.metadata.version("tensorflow")
    assert found.threading == "own pool"  # PyPI's wheel does not link OpenMP
    assert "OMP_*/KMP_* do not" in found.summary


@pytest.mark.parametrize(
    ("flags", "setting", "used"),
    [
        ("fpu avx2 fma", None, False),
        ("fpu avx2 avx512f avx512_vnni", None, True),
        ("fpu avx2 avx_vnni", None, True),
        (None, None, None),  # a kernel that lists no processor flags
        ("fpu avx2 fma", "1", True),
        ("avx512_vnni", "0", False),
    ],
)
def test_whether_onednn_computes_by_default(
    flags: str | None, setting: str | None, *, used: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\n" + (f"flags : {flags}\n" if flags else ""))
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    if setting is not None:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", setting)
    assert find_engine(cpuinfo).onednn is used


@pytest.mark.long
@pytest.mark.parametrize("setting", [None, "0", "1"])
def test_tensorflow_itself_decides_the_same(setting: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TF_ENABLE_ONEDNN_OPTS"}
    environment |= {} if setting is None else {"TF_ENABLE_ONEDNN_OPTS": setting}
    program = (
        "from hpcdl.node.engine import find_engine\nfrom hpcdl.step.keras_internals import onednn_in_use\n"
        "print(find_engine().onednn, onednn_in_use())"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    ours, its = finished.stdout.split()[-2:]
    assert ours == its


def test_needed_libraries_of_real_files() -> None:
    spec = importlib.util.find_spec("tensorflow")
    assert spec is not None
    assert spec.origin is not None
    names = needed_libraries(Path(spec.origin).parent / "libtensorflow_cc.so.2")
    assert "libtensorflow_framework.so.2" in names
    assert "libc.so.6" in needed_libraries(Path(sys.executable).resolve()) + needed_libraries(Path("/bin/sh").resolve())


def elf_needing(name: str) -> bytes:
    """Return a minimal ELF file with one DT_NEEDED entry."""
    strings = b"\0" + name.encode() + b"\0"
    dynamic = struct.pack("<qQqQqQ", 1, 1, 5, 400, 0, 0)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 2)
    load = struct.pack("<IIQQQQQQ", 1, 0, 0, 0, 0, 1000, 1000, 0)
    table = struct.pack("<IIQQQQQQ", 2, 0, 200, 200, 200, len(dynamic), len(dynamic), 0)
    image = bytearray(1000)
    image[:64], image[64:176] = header, load + table
    image[200 : 200 + len(dynamic)] = dynamic
    image[400 : 400 + len(strings)] = strings
    return bytes(image)


def test_an_openmp_build_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tensorflow"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "libtensorflow_framework.so.2").write_bytes(elf_needing("libiomp5.so"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorflow"]:
        monkeypatch.delitem(sys.modules, name)
    assert engine.links_openmp()


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01", b"not a library", b"\x7fELF\x02\x01" + bytes(58)])
def test_other_files_need_nothing(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(content)
    assert needed_libraries(path) == []


def test_isa_caps_lie_below_what_the_processor_has(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: fpu avx2 avx512f avx512bw\n")
    assert find_engine(info).isa_caps == ("default", "AVX2")
    info.write_text("flags\t\t: fpu avx2\n")
    assert find_engine(info).isa_caps == ("default",)


@pytest.mark.parametrize(
    ("flags", "name"), [("fpu avx512_bf16 amx_bf16", "AMX"), ("avx512f avx512_bf16", "AVX-512"), ("avx512f", "")]
)
def test_processors_that_multiply_bfloat16(flags: str, name: str, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags : {flags}\n")
    assert find_engine(info).bfloat16 == name
    doubt = slow_precision("mixed_bfloat16", info)
    slower = "mixed_bfloat16: this processor has no instructions for bfloat16, so float32 may be faster"
    assert doubt == ("" if name else f"{slower}; hpcdl bench step with and without --precision shows it")
    assert slow_precision("mixed_bfloat16", tmp_path / "of ARM") == "" == slow_precision("float32", info)
    assert "mixed_float16 is for GPUs" in slow_precision("mixed_float16", info)
