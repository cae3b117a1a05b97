"""Random changes to a batch of training images: pure functions of the batch and a generator.

All work on normalised images (B, C, H, W) and return a new batch of the same shape. `black` (C, 1, 1) is what a black
pixel is after normalisation; it fills what moves in from outside the image.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Augment = Callable[[Tensor, Tensor, torch.Generator], Tensor]

SHIFT = 2  # pixels each way
NUDGE = 1  # pixel each way
CROP = 4  # pixels each way
ROTATION, SCALE, SHEAR, OFFSET = math.radians(8), 0.08, 0.08, 0.5  # of `affine`, each way; the offset in pixels


def _move(images: Tensor, black: Tensor, reach: int, generator: torch.Generator) -> Tensor:
    """Move each image by -reach .. reach whole pixels in both directions, all offsets equally likely."""
    count, channels, height, width = images.shape
    canvas = black.expand(count, channels, height + 2 * reach, width + 2 * reach).contiguous()
    canvas[:, :, reach : reach + height, reach : reach + width] = images
    top, left = torch.randint(2 * reach + 1, (2, count), generator=generator)  # (B,) each
    windows = canvas.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 2 reach + 1, 2 reach + 1, H, W), a view
    return windows[torch.arange(count), :, top, left]


def shift(images: Tensor, black: Tensor, generator: torch.Generator) -> Tensor:
    """Translate by up to 2 pixels each way: digits stay readable."""
    return _move(images, black, SHIFT, generator)


def nudge(images: Tensor, black: Tensor, generator: torch.Generator) -> Tensor:
    """Translate by up to 1 pixel each way: as much as a small network without convolutions can learn."""
    return _move(images, black, NUDGE, generator)


def crop(images: Tensor, black: Tensor, generator: torch.Generator) -> Tensor:
    """Pad by 4 pixels and cut a window of the old size: the customary change for CIFAR."""
    return _move(images, black, CROP, generator)


def flip(images: Tensor, black: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror left and right with probability 1/2."""
    mirror = torch.rand(len(images), generator=generator) < 0.5  # (B,)
    return torch.where(mirror[:, None, None, None], images.flip(3), images)


def cutout(images: Tensor, black: Tensor, generator: torch.Generator) -> Tensor:
    """Set a square to 0, the mean colour (DeVries and Taylor 2017). Its side is half the shorter side: 16 of 32.

    The centre is uniform over the image, so a part of the square may lie outside.
    """
    height, width = images.shape[2:]
    side = min(height, width) // 2
    top = torch.randint(height, (len(images), 1), generator=generator) - side // 2  # (B, 1)
    left = torch.randint(width, (len(images), 1), generator=generator) - side // 2  # (B, 1)
    rows = torch.arange(height)  # (H,)
    columns = torch.arange(width)  # (W,)
    in_rows = (rows >= top) & (rows < top + side)  # (B, H)
    in_columns = (columns >= left) & (columns < left + side)  # (B, W)
    hole = in_rows[:, :, None] & in_columns[:, None, :]  # (B, H, W)
    return images.masked_fill(hole[:, None], 0.0)


def affine(images: Tensor, black: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate by up to 8 degrees, stretch each axis by up to 8 %, shear by up to 8 %, move by up to half a pixel.

    As hands differ: digits that were centred stay so. Bilinear interpolation.
    """
    count, _, height, width = images.shape
    angle, shear, wide, high, right, down = (torch.rand(6, count, generator=generator) * 2 - 1).unbind()
    cosine, sine = (angle * ROTATION).cos(), (angle * ROTATION).sin()
    wide, high = 1 + wide * SCALE, 1 + high * SCALE
    rows = (
        torch.stack([cosine * wide, (shear * SHEAR - sine) * high, right * 2 * OFFSET / width], 1),  # (B, 3)
        torch.stack([sine * wide, cosine * high, down * 2 * OFFSET / height], 1),
    )
    places = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)  # (B, H, W, 2)
    return F.grid_sample(images - black, places, align_corners=False) + black


AUGMENTS: dict[str, Augment] = {
    "shift": shift,
    "nudge": nudge,
    "affine": affine,
    "flip": flip,
    "crop": crop,
    "cutout": cutout,
}
