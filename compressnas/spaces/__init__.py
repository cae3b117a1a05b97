"""Cell spaces, by the name that recipes use."""

from collections.abc import Callable

from compressnas.spaces.cell import Space
from compressnas.spaces.nasbench201 import nasbench201

SPACES: dict[str, Callable[..., Space]] = {"nasbench201": nasbench201}
