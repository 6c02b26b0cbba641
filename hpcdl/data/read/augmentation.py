"""What may be done to training images on the way in; carried out in hpcdl.data.read.pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdl.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes, seeded by run, step and place in the global batch; the default changes nothing.

    `crop_padding` pixels are added on every side and a window of the old size is cut out at random (He et al. 2016,
    section 4.2). `flip` mirrors half of the images left to right. `mean` and `std` (one number per channel, of pixels
    in [0, 1]) turn images to float32, (pixel - mean) / std.
    """

    crop_padding: int = 0
    flip: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.crop_padding < 0:
            raise UsageError(f"crop padding is {self.crop_padding}; it must be 0 or more pixels")
        if (
            bool(self.mean) != bool(self.std)
            or len(self.mean) != len(self.std)
            or any(value <= 0 for value in self.std)
        ):
            raise UsageError("give mean and std together, one number per channel each, std above 0")

    @property
    def changes_nothing(self) -> bool:
        """Whether images go through as they are."""
        return not (self.crop_padding or self.flip or self.mean)


NONE = Augmentation()
