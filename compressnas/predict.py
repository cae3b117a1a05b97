"""Images from files to predictions of an exported model. Knows PIL, and no torch."""

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from compressnas.errors import InputError

Array = npt.NDArray[Any]

_BATCH = 256
_MODES = {1: "L", 3: "RGB"}


class Classifier(Protocol):
    """What `export.load_onnx` returns."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, int, int]: ...  # C, H, W

    def probabilities(self, images: Array) -> Array: ...  # uint8 (B, C, H, W) -> (B, classes)


def predictions(
    classifier: Classifier, paths: Sequence[Path], note: Callable[[str], None]
) -> Iterator[tuple[str, str, float]]:
    """Yield (name, class, probability) for each image, file by file.

    The image files are PNG, JPEG and whatever else PIL reads: made grey or RGB as the model expects, and resized,
    which `note` is told. `.npy` and `.npz` (its first array) hold uint8 images, N H W or N H W C, of the right size;
    the i-th is called `file[i]`.

    Raises:
        InputError: a file holds no such images.
    """
    for path in paths:
        is_array = path.suffix.lower() in (".npy", ".npz")
        images = _array_images(path, classifier.shape) if is_array else _image(path, classifier.shape, note)
        for start in range(0, len(images), _BATCH):
            rows = classifier.probabilities(images[start : start + _BATCH])
            for index, row in enumerate(rows, start):
                best = int(np.argmax(row))
                yield f"{path}[{index}]" if is_array else str(path), classifier.classes[best], float(row[best])


def _image(path: Path, shape: tuple[int, int, int], note: Callable[[str], None]) -> Array:
    """uint8 (1, C, H, W) from an image file."""
    channels, height, width = shape
    if channels not in _MODES:
        raise InputError(
            f"{path}: the model reads {channels} channels, and an image file has 1 or 3; give an .npy array"
        )
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I"):  # 16 bits a pixel; `convert` would cut off at 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert(_MODES[channels])
            if image.size != (width, height):
                note(f"note: {path}: resized from {image.height} x {image.width} to {height} x {width}")
                image = image.resize((width, height), Image.Resampling.BILINEAR)
    except (
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:  # all that PIL raises for bad files
        raise InputError(f"{path}: not an image that can be read: {' '.join(str(error).split())}") from error
    pixels = np.asarray(image, dtype=np.uint8).reshape(height, width, channels)  # (H, W, C)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


def _array_images(path: Path, shape: tuple[int, int, int]) -> Array:
    """uint8 (N, C, H, W) from an .npy or .npz file."""
    channels, height, width = shape
    try:
        with open(path, "rb") as file:  # numpy leaves a path open when the zip in it is damaged
            loaded = np.load(file, allow_pickle=False)
            array = loaded[loaded.files[0]] if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    except (OSError, ValueError, EOFError, IndexError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path}: not a numpy file that can be read: {' '.join(str(error).split())}") from error
    array = np.asarray(array)  # a member of an .npz that is no array comes as bytes
    expected = (height, width) if channels == 1 and array.ndim == 3 else (height, width, channels)
    if array.dtype != np.uint8 or array.shape[1:] != expected:
        wanted = f"uint8 (N, {height}, {width}{'' if channels == 1 else f', {channels}'})"
        raise InputError(f"{path}: expected {wanted}, got {array.dtype} {array.shape}")
    return np.ascontiguousarray(array.reshape(-1, height, width, channels).transpose(0, 3, 1, 2))
