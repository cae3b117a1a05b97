"""Cell spaces, by the name that recipes use."""

from collections.abc import Callable

from compressnas.spaces.cell import Space
from compressnas.spaces.darts import darts
from compressnas.spaces.nasbench1shot1 import nasbench1shot1
from compressnas.spaces.nasbench201 import nasbench201

SPACES: dict[str, Callable[..., Space]] = {
    "darts": darts,
    "nasbench1shot1": nasbench1shot1,
    "nasbench201": nasbench201,
}
