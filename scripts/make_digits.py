"""Remake share/hpcdl/examples/digits from scikit-learn's copy of the UCI handwritten digits.

Usage: python scripts/make_digits.py [FOLDER]     (needs scikit-learn and pillow; FOLDER must not exist yet)

Each image is 8x8 and greyscale; the data set's values 0..16 become 0..255. FOLDER/<class>/<index>.png keeps the
index that the image has in the data set, so that every image can be traced back.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits  # type: ignore[import-not-found, unused-ignore]  # needed here only

DEFAULT = Path(__file__).resolve().parents[1] / "share" / "hpcdl" / "examples" / "digits"
LARGEST_VALUE = 16


def write_digits(folder: Path) -> int:
    """Write all images below `folder`, one sub-folder per class, and return how many there are."""
    digits = load_digits()
    pixels = (digits.images * 255 / LARGEST_VALUE).round().astype("uint8")
    for label in sorted(set(digits.target.tolist())):
        (folder / str(label)).mkdir(parents=True)
    for index, (image, label) in enumerate(zip(pixels, digits.target.tolist(), strict=True)):
        Image.fromarray(image).save(folder / str(label) / f"{index:04d}.png", optimize=True)
    return len(pixels)


def main() -> None:
    """Write the images to the folder of the command line, or into the examples."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    if folder.exists():
        sys.exit(f"{folder} exists; remove it first or name another folder")
    print(f"{write_digits(folder)} images written to {folder}")


if __name__ == "__main__":
    main()
