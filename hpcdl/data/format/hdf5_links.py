"""Parts of an HDF5 file that are stored in other files: refused, or followed if the user allows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

_MOST_LINKS = 8
"""The most links that may be followed in a chain from file to file."""


class StoredOutside(ValueError):
    """A part of a file is stored in another file that may not be opened; `remedy` tells the user what to do."""

    def __init__(self, part: str, remedy: str = "give --follow-links to read it there") -> None:
        super().__init__(part)
        self.remedy = remedy


def arrays_inside(file: h5py.File) -> dict[str, h5py.Dataset]:
    """Return the data sets of a file by path; StoredOutside if a part of it is stored in another file.

    HDF5 would open any path named there: external links, external storage and virtual data sets. Soft links cannot
    leave the file.
    """
    links: dict[str, Any] = {}
    file.visititems_links(links.__setitem__)  # h5py ignores errors raised in the callback: check afterwards
    arrays = {}
    for name, link in links.items():
        if isinstance(link, h5py.ExternalLink):
            raise StoredOutside(f"{name} is a link to {link.path} in another file, {link.filename}")
        target = file[name] if isinstance(link, h5py.HardLink) else None
        if isinstance(target, h5py.Dataset):
            _check_storage(name, target)
            if target.is_virtual:
                files = sorted({source.file_name for source in target.virtual_sources()})
                raise StoredOutside(f"{name} is a virtual data set, whose values are in other files ({_some(files)})")
            arrays[name] = target
    return arrays


def arrays_linked(file: h5py.File) -> dict[str, h5py.Dataset]:
    """Return the data sets behind the external links of a file, by the path of the link and the path below it.

    Raises ValueError for a broken or circular link, and for a virtual data set with missing parts.
    """
    return dict(_followed(file, "", (_identity(file),)))


def _followed(group: Any, above: str, seen: tuple[Any, ...]) -> Iterator[tuple[str, h5py.Dataset]]:
    links: dict[str, Any] = {}
    # HDF5's visit does not enter external links: groups behind them are visited below.
    group.visititems_links(links.__setitem__)
    for name, link in links.items():
        path = f"{above}{name}"
        if isinstance(link, h5py.HardLink):
            array = group[name]
            if isinstance(array, h5py.Dataset):
                _check_storage(path, array)
                _check_sources(path, array)
                # Arrays of the file itself are found by its plain visit.
                if above:
                    yield path, array
        elif isinstance(link, h5py.ExternalLink):
            try:
                target = group[name]
            except (KeyError, OSError) as error:
                raise ValueError(f"{path} is a link to {link.path} in {link.filename}, which is not there") from error
            if isinstance(target, h5py.Dataset):
                _check_storage(path, target)
                _check_sources(path, target)
                yield path, target
            elif isinstance(target, h5py.Group):
                if _identity(target) in seen or len(seen) > _MOST_LINKS:
                    raise ValueError(f"{path} is a link to {link.path} in {link.filename}, in a circle or too far")
                yield from _followed(target, f"{path}/", (*seen, _identity(target)))


def files_behind(data: h5py.Dataset, path: Path) -> list[Path]:
    """Return the files other than `path` that hold values of a data set."""
    own_file = Path(data.file.filename)
    files = [] if own_file == path else [own_file]
    if data.is_virtual:
        for source in data.virtual_sources():
            # HDF5 writes "." for the file of the data set itself.
            if source.file_name != ".":
                source_file = _source_file(data, source.file_name)
                with h5py.File(source_file, "r", locking=False) as opened:
                    files += [source_file, *files_behind(opened[source.dset_name], source_file)]
    return list(dict.fromkeys(files))


def _check_sources(name: str, data: h5py.Dataset, depth: int = 0) -> None:
    """Raise ValueError unless every value of a virtual data set exists: HDF5 replaces missing ones by a fill value."""
    if not data.is_virtual:
        return
    count = 0
    for source in data.virtual_sources():
        described = f"{name} is a virtual data set of {source.dset_name} in {source.file_name}"
        # h5py returns the pattern, and not the files that it stands for.
        if "%" in source.file_name + source.dset_name:
            raise ValueError(
                f"{described}, a pattern of names; save it with the names of its files, or copy its values"
            )
        if depth > _MOST_LINKS:
            raise ValueError(f"{described}, in a circle or too far")
        if source.file_name == ".":
            count += _check_source(described, source, data.file, depth)
            continue
        source_file = _source_file(data, source.file_name)
        if not source_file.is_file():
            raise ValueError(f"{described}, which is not there")
        with h5py.File(source_file, "r", locking=False) as file:
            count += _check_source(described, source, file, depth)
    if count < data.size:
        raise ValueError(
            f"{name} is a virtual data set of which {data.size - count} of {data.size} values exist nowhere"
        )


def _check_source(where: str, source: Any, file: h5py.File, depth: int) -> int:
    """Return how many values a file supplies to a virtual data set; ValueError if it lacks any of them."""
    array = file.get(source.dset_name)
    if not isinstance(array, h5py.Dataset):
        raise ValueError(f"{where}, which is not there")
    selection, count = source.src_space, int(source.vspace.get_select_npoints())
    fits = array.size >= count
    if selection.get_select_type() != h5py.h5s.SEL_ALL:
        last = selection.get_select_bounds()[1]
        fits = len(last) == array.ndim and all(bound < side for bound, side in zip(last, array.shape, strict=True))
    if not fits:
        raise ValueError(f"{where}, which has the shape {array.shape}: some of its values are not there")
    _check_storage(where, array)
    _check_sources(where, array, depth + 1)
    return count


def _check_storage(name: str, data: h5py.Dataset) -> None:
    """Raise StoredOutside for values in a file that is not HDF5: only h5repack brings them in, no flag does."""
    creation_settings = data.id.get_create_plist()
    if creation_settings.get_external_count():
        file = np.bytes_(creation_settings.get_external(0)[0]).decode(errors="replace")
        raise StoredOutside(
            f"the data of {name} are in another file, {file} (external storage)", "bring them into this one: h5repack"
        )


def _source_file(data: h5py.Dataset, name: str) -> Path:
    """Return the file that HDF5 opens for a name in a virtual data set: beside that data set's file, else as named."""
    folder = Path(data.file.filename).parent
    beside = folder / name if not Path(name).is_absolute() else folder / Path(name).name
    first, second = (Path(name), beside) if Path(name).is_absolute() else (beside, Path(name))
    return second if second.is_file() and not first.is_file() else first


def _identity(group: Any) -> tuple[int, int]:
    info = h5py.h5o.get_info(group.id)
    return int(info.fileno), int(info.addr)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
