"""The settings that the installed TensorFlow and the node's libraries honour, found without importing TensorFlow."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from hpcdl.config.settings import AUTO
from hpcdl.core.errors import UsageError

PACKAGES = ("tensorflow", "tensorflow-cpu", "intel-tensorflow", "tensorflow-intel", "tensorflow-rocm")
OPENMP_LIBRARIES = ("libiomp5", "libgomp", "libomp")
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)
PRELOADS = {"jemalloc": ("libjemalloc.so.2",), "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")}
_FOR_NETWORKS = {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}
_BFLOAT16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512"}
# PT_DYNAMIC, DT_NEEDED, DT_STRTAB and PT_LOAD of elf.h.
_DYNAMIC, _NEEDED, _STRTAB, _LOAD = 2, 1, 5, 1


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The build: `threading` is `own pool` (stock wheels) or `OpenMP` (MKL builds, which honour OMP_* and KMP_*).

    `onednn` says whether it computes with oneDNN by default; None if unknown.
    """

    package: str
    version: str
    threading: str
    isa_caps: tuple[str, ...]
    allocators: tuple[str, ...]
    onednn: bool | None = None
    bfloat16: str = ""
    """The instructions with which this processor multiplies bfloat16; empty if it has none."""

    @property
    def openmp(self) -> bool:
        """Whether OMP_* and KMP_* count."""
        return self.threading == "OpenMP"

    @property
    def summary(self) -> str:
        """One sentence for people: the installed build and the settings that it obeys."""
        honours = (
            "OMP_* and KMP_* count" if self.openmp else "intra-op, inter-op and affinity count, OMP_*/KMP_* do not"
        )
        return f"{self.package} {self.version} ({self.threading}: {honours})"


def find_engine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Engine:
    """Return the TensorFlow that this Python would import; package `none` if there is none."""
    package, version = installed()
    flags = _flags(cpuinfo)
    return Engine(
        package=package,
        version=version,
        threading="OpenMP" if links_openmp() else "own pool",
        isa_caps=_isa_caps(flags),
        allocators=allocators(),
        onednn=_uses_onednn(flags),
        bfloat16=next((name for flag, name in _BFLOAT16.items() if flag in flags), ""),
    )


def slow_precision(policy: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return a warning if processors compute Keras's `policy` much slower than float32; empty otherwise."""
    compare = "hpcdl bench step with and without --precision shows it"
    if policy.endswith("bfloat16"):
        flags = _flags(cpuinfo)
        if flags & set(_BFLOAT16) or not flags:  # not told: no flag of ARM's or POWER's is looked for
            return ""
        return f"{policy}: this processor has no instructions for bfloat16, so float32 may be faster; {compare}"
    if policy.endswith("float16"):
        return f"{policy} is for GPUs: processors compute float16 many times slower than float32; {compare}"
    return ""


def allocators() -> tuple[str, ...]:
    """Return the allocators that this node has."""
    return ("default", *_glibc(), *(name for name in PRELOADS if preload_path(name) is not None))


def check_library(name: str) -> None:
    """Raise UsageError if this node lacks the library of the allocator `name`; AUTO needs none."""
    if name in (AUTO, *allocators()):
        return
    needs = " or ".join(PRELOADS.get(name, ("glibc 2.35",)))
    more = "; a site names more folders in HPCDL_PRELOAD_PATH" if name in PRELOADS else ""
    raise UsageError(
        f"--allocator {name}: this node has no {needs}; possible here: {', '.join(allocators())} (install it{more})"
    )


def is_preloaded(allocator: str) -> bool:
    """Return whether the library of `allocator` is loaded in this process; True for allocators without a library."""
    names = PRELOADS.get(allocator, ())
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # this kernel does not tell
    return not names or any(name.partition(".so")[0] in mapped for name in names)


def preload_path(allocator: str) -> Path | None:
    """Return the path of the library of `allocator`, in system folders and the site's `HPCDL_PRELOAD_PATH` only."""
    folders = [*filter(None, os.environ.get("HPCDL_PRELOAD_PATH", "").split(":")), *LIBRARY_FOLDERS]
    candidates = (Path(folder) / name for folder in folders for name in PRELOADS.get(allocator, ()))
    return next((path for path in candidates if path.is_file()), None)


def installed() -> tuple[str, str]:
    """Return package and version of the TensorFlow that this Python would import; `none` and empty text without one."""
    for name in PACKAGES:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none", ""


def links_openmp() -> bool:
    """Return whether the TensorFlow that this Python would import is linked with an OpenMP library."""
    spec = importlib.util.find_spec("tensorflow")  # finds it without importing it, which takes seconds
    if spec is None or not spec.origin:
        return False
    libraries = Path(spec.origin).parent.glob("libtensorflow_*.so*")
    needed = [name for library in libraries for name in needed_libraries(library)]
    return any(name.startswith(OPENMP_LIBRARIES) for name in needed)


def needed_libraries(path: Path) -> list[str]:
    """Return the DT_NEEDED names of a 64-bit little-endian ELF file (System V ABI, chapter 5); none for other files."""
    try:
        with path.open("rb") as file:
            header = file.read(64)
            if header[:6] != b"\x7fELF\x02\x01":  # EI_CLASS 64 bit, EI_DATA little-endian
                return []
            # At 32 is e_phoff, at 54 are e_phentsize and e_phnum.
            offset, size, count = struct.unpack_from("<Q", header, 32)[0], *struct.unpack_from("<HH", header, 54)
            file.seek(offset)
            table = file.read(size * count)
            # Type, flags, offset in the file, virtual address, physical address, size in the file.
            segments = [struct.unpack_from("<IIQQQQ", table, index * size) for index in range(count)]
            dynamic = next((segment for segment in segments if segment[0] == _DYNAMIC), None)
            if dynamic is None:
                return []
            file.seek(dynamic[2])
            entries = list(struct.iter_unpack("<qQ", file.read(dynamic[5] // 16 * 16)))
            # DT_STRTAB is an address in memory: the segment that is loaded there leads to its place in the file.
            address = next(value for tag, value in entries if tag == _STRTAB)
            load = next(
                segment
                for segment in segments
                if segment[0] == _LOAD and segment[3] <= address < segment[3] + segment[5]
            )
            names = []
            for tag, value in entries:
                if tag == _NEEDED:
                    file.seek(load[2] + address - load[3] + value)
                    names.append(file.read(256).split(b"\0")[0].decode(errors="replace"))
            return names
    except (OSError, struct.error, StopIteration):
        return []


def _flags(cpuinfo: Path) -> set[str]:
    """Return the processor's feature flags; empty if the kernel does not tell."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), []))


def _uses_onednn(flags: set[str]) -> bool | None:
    """Return TensorFlow's own choice (its util/port.cc): on if there are instructions for networks, else off."""
    setting = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "")
    if setting:
        return setting.lower() in ("1", "true")
    return bool(flags & _FOR_NETWORKS) if flags else None


def _isa_caps(flags: set[str]) -> tuple[str, ...]:
    """Return the caps below this processor's level: capping at or above it changes nothing."""
    steps = [("AVX2", "avx512bw"), ("AVX512_CORE", "avx512_bf16"), ("AVX512_CORE_BF16", "amx_tile")]
    return ("default", *(cap for cap, above in steps if above in flags))


def _glibc() -> tuple[str, ...]:
    """Return glibc's allocators: since 2.35 it has the tunable for huge pages (manual, Memory Allocation Tunables)."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        new_enough = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
    except (ValueError, OSError):
        new_enough = False
    return ("glibc-tuned", "glibc-huge") if new_enough else ()
