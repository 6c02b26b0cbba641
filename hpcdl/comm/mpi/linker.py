"""Which file of this process a C function comes from, as the dynamic linker tells."""

from __future__ import annotations

import ctypes
import os


class _Where(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def file_of(extension: str, symbol: str) -> str:
    """The shared library that gives `extension`, a loaded one, the function `symbol`; empty where that is unknown."""
    function = getattr(ctypes.CDLL(extension), symbol)
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Where)]
    where = _Where()
    found = dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(where))
    return os.fsdecode(where.file_name) if found and where.file_name else ""
