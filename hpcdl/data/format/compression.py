"""Lossless compression of raw blocks by HDF5's filters; zstd and blosc2 come with the extra `hpcdl[compression]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcdl.core.errors import UsageError


def _plugin() -> Any:
    try:
        import hdf5plugin
    except ImportError:
        raise UsageError("--compression needs hdf5plugin; install hpcdl[compression], or take gzip") from None
    return hdf5plugin


_FILTERS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "gzip": lambda: {"compression": "gzip", "compression_opts": 4},
    "zstd": lambda: dict(_plugin().Zstd(clevel=3)),
    "blosc2": lambda: dict(_plugin().Blosc2(cname="zstd", clevel=5, filters=_plugin().Blosc2.SHUFFLE)),
}


def filters(name: str | None) -> Mapping[str, Any] | None:
    """The arguments that tell h5py of a compression; None for none. UsageError where its package is missing."""
    return None if name is None else _FILTERS[name]()
