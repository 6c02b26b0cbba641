from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcdl.node.plan import environment_of, shell_exports
from hpcdl.node.profile import Settings


def test_stock_wheels_get_no_openmp_variables() -> None:
    settings = Settings(intra_op_threads=32, inter_op_threads=2, kmp_blocktime=1)
    assert environment_of(settings, openmp=False) == {
        "HPCDL_INTRA_OP_THREADS": "32", "TF_NUM_INTRAOP_THREADS": "32",
        "HPCDL_INTER_OP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "2",
    }  # fmt: skip


def test_openmp_builds_get_them() -> None:
    found = environment_of(Settings(intra_op_threads=32, kmp_blocktime=0), openmp=True)
    assert (found["OMP_NUM_THREADS"], found["KMP_BLOCKTIME"]) == ("32", "0")
    assert "KMP_AFFINITY" in found
    assert "KMP_AFFINITY" not in environment_of(Settings(binding="none"), openmp=True)


def test_engine_and_graph() -> None:
    settings = Settings(onednn=False, onednn_isa="AVX2", onednn_fpmath="BF16", xla=True)
    assert environment_of(settings, openmp=False) == {
        "TF_ENABLE_ONEDNN_OPTS": "0", "ONEDNN_MAX_CPU_ISA": "AVX2", "TF_SET_ONEDNN_FPMATH_MODE": "BF16",
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit",
    }  # fmt: skip


def test_default_settings_change_nothing() -> None:
    assert environment_of(Settings(), openmp=False) == {}


def test_preloads_come_from_known_folders_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libjemalloc.so.2"
    library.write_bytes(b"")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("HPCDL_PRELOAD_PATH", str(tmp_path))
    environment = environment_of(Settings(allocator="jemalloc"), openmp=False)
    assert environment == {"LD_PRELOAD": str(library), "HPCDL_ALLOCATOR": "jemalloc"}, "ranks look whether it is loaded"


def test_glibc_knows_the_tunables() -> None:
    """glibc accepts the tunables without a message, and fewer page faults show that the threshold applies."""
    code = "import resource\nfor _ in range(20): b = bytearray(64 << 20)\nprint(resource.getrusage(0).ru_minflt)"
    faults = {}
    for allocator in ("default", "glibc-tuned"):
        environment = os.environ | environment_of(Settings(allocator=allocator), openmp=False)
        done = subprocess.run(["python3", "-c", code], env=environment, capture_output=True, text=True, check=True)
        faults[allocator] = int(done.stdout)
    assert faults["glibc-tuned"] < faults["default"] / 4


def test_exports_survive_a_shell() -> None:
    lines = shell_exports({"A": "x y", "B": "$(touch /nonexistent); 'q'"})
    script = "\n".join(lines) + '\nprintf "%s|%s" "$A" "$B"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "x y|$(touch /nonexistent); 'q'"
