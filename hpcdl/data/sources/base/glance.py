"""Quick checks: the content of a folder, and the type of a file that is not an image.

Checking a folder costs one listing, and no stat per file. A file is identified by its first bytes and its ending; the
message says what to do about it.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path, PurePath

from hpcdl.core.errors import SourceError
from hpcdl.core.storage.files import open_regular

MAGIC = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
"""First bytes of the supported image files; WebP's mark is further on."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp")
HEAD_BYTES = 132
"""Enough bytes to tell all formats here apart; DICOM's mark is the furthest."""
_KINDS = (*dict.fromkeys(MAGIC.values()), "WebP")
_HEADS = {
    b"RIFF": "a WAV or AVI file",
    b"\x93NUMPY": "a numpy array",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"SIMPLE  =": "a FITS file",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a file packed with gzip",
    b"fLaC": "a FLAC file",
    b"OggS": "an Ogg file",
    b"ID3": "an MP3 file",
    b"%PDF": "a PDF file",
    b"root": "a ROOT file",
    b"PAR1": "a Parquet file",
    b"CDF\x01": "a netCDF-3 file",
    b"CDF\x02": "a netCDF-3 file",
}
_SUFFIXES = {
    ".nii": "a NIfTI file",
    ".nii.gz": "a NIfTI file",
    ".dcm": "a DICOM file",
    ".fits": "a FITS file",
    ".mha": "a MetaImage file",
    ".mp4": "a film",
    ".mov": "a film",
    ".avi": "a film",
    ".heic": "a HEIC image",
    ".jp2": "a JPEG 2000 image",
    ".avif": "an AVIF image",
    ".jxl": "a JPEG XL image",
    ".ppm": "a PPM image",
    ".pgm": "a PGM image",
    ".pbm": "a PBM image",
    ".pnm": "a PNM image",
    ".tga": "a TGA image",
    ".psd": "a Photoshop image",
    ".ico": "an icon",
    ".exr": "an OpenEXR image",
    ".svg": "an SVG drawing",
}
_NOTES = {
    ".txt": "text: of each image's boxes or labels (as YOLO has them)?",
    ".xml": "XML: of each image's boxes (as Pascal VOC has them)?",
    ".json": "JSON: of images' labels or boxes (as COCO has them)?",
    ".csv": "a table.",
    ".md": "text.",
    ".py": "a program.",
}
_OWN = {"a numpy array": "numpy", "an HDF5 file": "hdf5", "a Parquet file": "parquet"}


_GZIP = b"\x1f\x8b"
_REMEDIES = {
    b"BZh": "it is packed with bzip2: unpack it (bunzip2)",
    b"\xfd7zXZ": "it is packed with xz: unpack it (unxz)",
    b"\x28\xb5\x2f\xfd": "it is packed with Zstandard: unpack it (unzstd)",
    b"7z\xbc\xaf\x27\x1c": "it is an archive: unpack it (7z x)",
    b"Rar!": "it is an archive: unpack it (unrar x)",
    b"GRIB": "it is GRIB: save it as netCDF-4 (cdo -f nc4 copy OLD NEW)",
    b"\x0e\x03\x13\x01": "it is HDF4: save it as HDF5 (h4toh5 OLD NEW)",
    _GZIP: "it is packed with gzip: unpack it (gunzip)",
    b"MATLAB 5.0": "it is a MATLAB file of version 5: save it with -v7.3",
    b"CDF\x01": "it is netCDF-3: save it as netCDF-4 (nccopy -k nc4 OLD NEW)",
    b"CDF\x02": "it is netCDF-3: save it as netCDF-4 (nccopy -k nc4 OLD NEW)",
    b"CDF\x05": "it is netCDF-3: save it as netCDF-4 (nccopy -k nc4 OLD NEW)",
}
"""What to do about files that other programs turn into a format that is read, by their first bytes."""
_SHEET = "it is a spreadsheet: save its sheet as CSV"
_BY_PANDAS = "convert it with pandas: pandas.{reader}(OLD{more}).to_parquet(NEW)"
_PICKLE = "it may be a pickle, which can run any code when it is read: save its arrays with numpy.savez"
_DATABASE = "it is a database: write a table of it as CSV"
_LIBSVM = (
    "it is LIBSVM's: x, y = sklearn.datasets.load_svmlight_file(OLD); numpy.savez(NEW, x=x.toarray(), y=y) makes arrays"
)
_LIBSVM_LINE = re.compile(rb"[-+0-9.eE,]+(?: [0-9]+:[-+0-9.eE]+)+ ?(?:\s|$)")
"""A label, and pairs of a column's number and value."""
_REMEDIES_BY_SUFFIX = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), _SHEET),
    **dict.fromkeys((".feather", ".arrow"), _BY_PANDAS.format(reader="read_feather", more="")),
    **dict.fromkeys((".jsonl", ".ndjson"), _BY_PANDAS.format(reader="read_json", more=", lines=True")),
    ".zip": "it is an archive without images: unpack it, and give the folder or one of its files",
    ".json": "it is JSON: convert rows with pandas: pandas.read_json(OLD).to_parquet(NEW)",
    ".arff": "it is ARFF: save the lines below @data as .csv, with a first line that names the columns",
    **dict.fromkeys((".svm", ".libsvm", ".svmlight"), _LIBSVM),
    **dict.fromkeys((".rds", ".rda", ".rdata"), "it is a file of R: write a data frame as CSV (write.csv)"),
    ".mdb": "it is LMDB: give a reader of your own (--reader FILE.py:NAME)",
    ".orc": _BY_PANDAS.format(reader="read_orc", more=""),
    ".dta": _BY_PANDAS.format(reader="read_stata", more=""),
    ".sav": _BY_PANDAS.format(reader="read_spss", more=""),
    ".sas7bdat": _BY_PANDAS.format(reader="read_sas", more=""),
    **dict.fromkeys((".pkl", ".pickle", ".joblib", ".pt", ".pth"), _PICKLE),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3"), _DATABASE),
}


def remedy_for(path: Path) -> str:
    """Return what a file is that no source reads, and what to do; empty if that is not known."""
    with open_regular(path) as file:
        head = file.read(HEAD_BYTES)
    by_head = next((remedy for mark, remedy in _REMEDIES.items() if head.startswith(mark)), "")
    by_head = by_head or (_LIBSVM if _LIBSVM_LINE.match(head) else "")
    kind, remedy = _kind(path.name, head), by_head or _REMEDIES_BY_SUFFIX.get(path.suffix.lower(), "")
    if is_image_head(head):
        return "it is one image: give the folder that holds a folder of images for each class"
    packed = remedy == _REMEDIES[_GZIP] and path.name.lower().endswith(".nii.gz")
    if kind and kind not in (*_OWN, "a zip archive") and (packed or not remedy):
        return f"it is {kind}: give a reader of your own (--reader FILE.py:NAME)"
    return remedy


def is_image_head(head: bytes) -> bool:
    """Return whether the first 12 bytes or more of a file are those of a supported image format."""
    return any(head.startswith(magic) for magic in MAGIC) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def check_is_image(head: bytes, name: str) -> None:
    """Raise SourceError unless a file starts like an image; the message says what it is, if known."""
    if not is_image_head(head):
        raise SourceError(f"{name.encode('utf-8', 'replace').decode()} is {what_it_is(name, head)}")


def what_it_is(name: str, head: bytes) -> str:
    """Describe the file in a message, and say what to type if it is data or if it is not."""
    path = PurePath(name)
    pattern = f"'*{path.suffix}'" if path.suffix else f"'{path.name}'"
    kind = _kind(path.name, head)
    if kind in _OWN:
        return (
            f"{kind}, not an image. Folders per class are read of images and .txt files alone: join the samples into "
            f"one file with an array of labels (--format {_OWN[kind]}), or give a reader of your own, as for samples "
            "of unequal length (--reader FILE.py:NAME)"
        )
    images = f"(images: {', '.join(_KINDS)})"
    if kind is not None:
        saved = "save it as PNG or TIFF, or " if kind.endswith(" image") else ""
        return (
            f"{kind}; class folders are read for images alone {images}. If it is the data, {saved}give a reader of "
            f"your own (--reader FILE.py:NAME); if not, --leave-out {pattern}"
        )
    note = _NOTES.get(path.suffix.lower())
    if note is not None:
        return f"not an image but {note} Give --leave-out {pattern} if classes are the folders alone"
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return f"not an image, or damaged {images}; take it away, or give --on-error skip"
    return (
        f"not an image {images}. If it is the data, give a reader of your own (--reader FILE.py:NAME); if not, "
        f"--leave-out {pattern}"
    )


def _kind(name: str, head: bytes) -> str | None:
    """Return what a file is by its first bytes or the ending of its name; None if neither is known."""
    kind = next((kind for mark, kind in _HEADS.items() if head.startswith(mark)), None)
    # DICOM's mark follows 128 bytes of any content.
    if head[128:132] == b"DICM":
        kind = "a DICOM file"
    return next((own for suffix, own in _SUFFIXES.items() if name.lower().endswith(suffix)), kind)


_LOOKED_INTO = 16


def files_of(folder: Path) -> list[Path]:
    """Return the files in a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(folder / entry.name for entry in entries if entry.is_file())


def folders_of(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(folder / entry.name for entry in entries if entry.is_dir())


def has_folders_of_images(folder: Path, levels: int = 2) -> bool:
    """Return whether a folder inside (or one inside that) holds image files, judging by the first entries."""
    with os.scandir(folder) as entries:
        # A few entries tell enough: a folder of a data set may have millions.
        first = list(itertools.islice((entry for entry in entries if entry.is_dir()), _LOOKED_INTO))
    for entry in first:
        with os.scandir(entry.path) as entries:
            inside = list(itertools.islice(entries, _LOOKED_INTO))
        if any(inner_entry.is_file() and inner_entry.name.lower().endswith(IMAGE_SUFFIXES) for inner_entry in inside):
            return True
        if levels > 1 and has_folders_of_images(Path(entry.path), levels - 1):
            return True
    return False
