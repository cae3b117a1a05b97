"""The decision on disk: what is written is read back, the same decision is the same bytes, and nonsense is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressnas.errors import InputError
from compressnas.slim import SlimArch

SLIM = SlimArch(
    {"conv1.out": (0, 2, 5), "fc1.in": (), "conv1.shape": (7,)},
    {"conv1.out": 6, "fc1.in": 3, "conv1.shape": 25},
    {"method": "bayes", "seed": 3, "lam": 1e-3, "fresh": False, "target": None},
)


@st.composite
def decisions(draw: st.DrawFn) -> SlimArch:
    names = draw(st.lists(st.text(min_size=1), unique=True, max_size=4))
    sizes = {name: draw(st.integers(1, 40)) for name in names}
    kept = {name: tuple(sorted(draw(st.sets(st.integers(0, sizes[name] - 1))))) for name in names}
    scalars = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
    return SlimArch(kept, sizes, draw(st.dictionaries(st.text(), scalars, max_size=3)))


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(decisions())
def test_json_gives_back_the_same_decision_and_the_same_bytes(slim: SlimArch) -> None:
    again = SlimArch.from_json(slim.to_json())
    assert again == slim and again.to_json() == slim.to_json()


def test_the_order_in_which_sets_were_named_does_not_show() -> None:
    reordered = SlimArch(
        dict(reversed(SLIM.kept.items())), dict(reversed(SLIM.sizes.items())), dict(reversed(SLIM.origin.items()))
    )
    assert reordered.to_json() == SLIM.to_json()


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "slim.json"
    SLIM.save(path)
    assert SlimArch.load(path) == SLIM
    first = path.read_bytes()
    SlimArch.load(path).save(path)
    assert path.read_bytes() == first and first.endswith(b"\n")
    document = json.loads(first)
    assert document["sets"]["conv1.out"] == {"size": 6, "kept": [0, 2, 5]}


def test_removed_and_without() -> None:
    assert SLIM.removed("conv1.out") == (1, 3, 4) and SLIM.removed("fc1.in") == (0, 1, 2)
    left = SLIM.without({"fc1.in"})
    assert left.removed("fc1.in") == () and left.kept["conv1.out"] == (0, 2, 5)
    assert left.sizes == SLIM.sizes and left.origin == SLIM.origin
    assert SLIM.without(set()) == SLIM


def test_a_decision_cannot_be_changed_behind_its_back() -> None:
    kept = {"a.out": (0,)}
    slim = SlimArch(kept, {"a.out": 2})
    kept["a.out"] = (1,)
    assert slim.kept["a.out"] == (0,)
    with pytest.raises(TypeError):
        slim.kept["a.out"] = (1,)  # type: ignore[index]


@pytest.mark.parametrize(
    "kept, sizes, message",
    [
        ({"a.out": (2, 1)}, {"a.out": 3}, "sorted, unique and in 0..2"),
        ({"a.out": (1, 1)}, {"a.out": 3}, "sorted, unique"),
        ({"a.out": (3,)}, {"a.out": 3}, "a.out: kept indices"),
        ({"a.out": (-1, 0)}, {"a.out": 3}, "in 0..2"),
        ({"a.out": (0,)}, {}, "different group sets: ..a.out"),
        ({}, {"b.out": 2}, "different group sets: ..b.out"),
    ],
)
def test_indices_that_make_no_sense_are_refused(
    kept: dict[str, tuple[int, ...]], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        SlimArch(kept, sizes)


def document(**changes: object) -> str:
    return json.dumps({"sets": {"a.out": {"size": 3, "kept": [0, 2]}}, "origin": {}} | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        document(sets=[]),
        document(sets=3),
        document(sets={"a.out": 3}),
        document(sets={"a.out": {"size": 3}}),
        document(sets={"a.out": {"size": "many", "kept": []}}),
        document(sets={"a.out": {"size": 3, "kept": 1}}),
        document(sets={"a.out": {"size": 3, "kept": ["x"]}}),
        document(sets={"a.out": {"size": 3, "kept": [5]}}),
        document(sets={"a.out": {"size": 3, "kept": [0.5]}}),
        document(sets={"a.out": {"size": 3, "kept": "02"}}),
        document(sets={"a.out": {"size": -3, "kept": []}}),
        document(origin=[]),
        document(origin=3),
    ],
)
def test_text_that_is_no_decision_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "slim.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        SlimArch.load(path)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.json", tmp_path, binary):
        with pytest.raises(InputError, match="cannot read .*" + path.name):
            SlimArch.load(path)
