"""SlimArch: the decision what stays, the one hand-over between deciding and everything after it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from compressnas.errors import InputError
from compressnas.files import write_whole

Origin = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True)
class SlimArch:
    """Which groups of each group set stay.

    Attributes:
        kept: group set name -> sorted indices of the groups that stay. Names are module path + `.out`, `.in` or
            `.shape` (flattened c, kh, kw, row-major).
        sizes: group set name -> the number of groups before removal.
        origin: where the decision came from: method, settings, seed.
    """

    kept: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]
    origin: Origin = field(default_factory=dict)

    def __post_init__(self) -> None:
        if set(self.kept) != set(self.sizes):
            raise InputError(f"kept and sizes name different group sets: {sorted(set(self.kept) ^ set(self.sizes))}")
        for name, indices in self.kept.items():
            if self.sizes[name] < 1:
                raise InputError(f"{name}: size {self.sizes[name]}, expected at least 1")
            if list(indices) != sorted(set(indices)) or (
                indices and not 0 <= indices[0] <= indices[-1] < self.sizes[name]
            ):
                raise InputError(f"{name}: kept indices must be sorted, unique and in 0..{self.sizes[name] - 1}")
        for attribute in ("kept", "sizes", "origin"):
            object.__setattr__(self, attribute, MappingProxyType(dict(getattr(self, attribute))))

    def removed(self, name: str) -> tuple[int, ...]:
        """Indices of the groups of `name` that go."""
        kept = set(self.kept[name])
        return tuple(i for i in range(self.sizes[name]) if i not in kept)

    def without(self, names: set[str]) -> "SlimArch":
        """The same decision with the group sets in `names` left alone (all of their groups kept)."""
        kept = {n: tuple(range(self.sizes[n])) if n in names else k for n, k in self.kept.items()}
        return SlimArch(kept, self.sizes, self.origin)

    def to_json(self) -> str:
        """JSON with sorted keys: the same decision is the same bytes."""
        sets = {n: {"size": self.sizes[n], "kept": list(self.kept[n])} for n in sorted(self.kept)}
        return json.dumps({"sets": sets, "origin": dict(self.origin)}, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> "SlimArch":
        """The inverse of `to_json`. Raises InputError for text that is no SlimArch."""
        try:
            document = json.loads(text)
            sets = document["sets"]
            kept = {name: tuple(_whole(i) for i in entry["kept"]) for name, entry in sets.items()}
            sizes = {name: _whole(entry["size"]) for name, entry in sets.items()}
            return SlimArch(kept, sizes, dict(document.get("origin", {}).items()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"not a SlimArch (expected JSON with `sets`): {error}") from error

    def save(self, path: str | Path) -> None:
        """Write `to_json` to `path`, whole or not at all."""
        write_whole(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> "SlimArch":
        """Read what `save` wrote. Raises InputError for a missing or damaged file."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}: {error}") from error
        return SlimArch.from_json(text)


def _whole(value: object) -> int:
    """The value itself. Raises TypeError for what is no whole number; int() would round it."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected a whole number, got {value!r}")
    return value
