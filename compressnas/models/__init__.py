"""Networks that a recipe can name."""

from collections.abc import Callable

from torch import nn

from compressnas.models.lenet import lenet5, lenet300_100

BUILDERS: dict[str, Callable[[tuple[int, int, int], int], nn.Module]] = {
    "lenet5": lenet5,
    "lenet300_100": lenet300_100,
}
