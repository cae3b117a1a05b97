"""Recipes: what loads, what is refused and how it is told, overrides, the resolved file and the hash."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from compressnas.errors import InputError
from compressnas.recipe import (
    MODELS,
    WITH_SHORTCUT,
    Bayes,
    ModelName,
    Recipe,
    load_recipe,
    recipe_hash,
    resolve,
    to_yaml,
)
from compressnas.recipe import shipped_recipes as shipped
from compressnas.yaml_text import read_yaml, write_yaml

GOOD = """
# A comment.
seed: 0
data: {name: mnist5k, augment: [shift]}
model: {name: lenet5}
train: {epochs: 10, lr: 0.05, batch_size: 128}
method: {kind: bayes, groups: filter, lam: 1e-3, epochs: 12}
finetune: {epochs: 8, lr: 0.02}
export: {int8: false}
"""

Write = Callable[[str], Path]
small = settings(max_examples=60, deadline=None, database=None)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_recipe(text: str) -> Path:
        path = tmp_path / "my.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


def faults(path: Path, *overrides: str) -> list[str]:
    """The fault lines of a recipe, after the first line has been checked against their number."""
    with pytest.raises(InputError) as caught:
        load_recipe(path, overrides)
    first, *lines = str(caught.value).split("\n")
    assert first == f"recipe {path}: {len(lines)} fault{'s' if len(lines) > 1 else ''}"
    return [line.strip() for line in lines]


def told(path: Path, *overrides: str) -> str:
    """The fault line of a recipe that has just one."""
    lines = faults(path, *overrides)
    assert len(lines) == 1, lines
    return lines[0]


# ---------------------------------------------------------------- loading


def test_the_sample_of_the_design_loads_with_its_defaults(write: Write) -> None:
    recipe = load_recipe(write(GOOD))
    assert isinstance(recipe.method, Bayes)
    assert recipe.method.lam == 1e-3
    assert recipe.method.groups == ("filter",)
    assert recipe.data.augment == ("shift",)
    assert recipe.device == "auto"
    assert recipe.finetune.momentum == 0.9


def test_a_recipe_is_frozen(write: Write) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe(write(GOOD)).seed = 3


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1.0e-3", 1e-3), ("1E5", 1e5), ("-.5", -0.5), ("1_000", 1000), ("010", 10), ("0", 0)]
    + [(text, text) for text in ("1:30", "2020-01-01", "e1", "1e", "0x10", ".", "-x")]
    + [("'1e-3'", "1e-3"), ("yes", True), ("null", None)],
)
def test_numbers_mean_what_they_look_like(text: str, value: object) -> None:
    read, twice = read_yaml(text)
    assert (read, type(read), twice) == (value, type(value), [])


def test_every_model_has_a_line() -> None:
    assert list(MODELS) == list(get_args(ModelName))


# ---------------------------------------------------------------- faults


def test_all_faults_are_listed_at_once_with_the_path_the_user_wrote(write: Write) -> None:
    text = """
seed: true
sed: 1
1: 2
data: {name: mnist5, augment: [shift, flop], limt: 3, limit: 0}
model: {name: lenet6}
method: {kind: bayes, groups: fliter, lam: -1, epochs: ten, lr: .nan, threshold: .inf, target: {flops: 1, params: 2}}
finetune: lots
export: {foo: 1}
"""
    lines = faults(write(text))
    paths = """seed sed 1 data.name data.augment[1] data.limt data.limit model.name method.groups method.lam
        method.epochs method.lr method.threshold method.target finetune export.foo train"""
    assert sorted(line.partition(":")[0] for line in lines) == sorted(paths.split())
    for line in (
        "seed: expected a whole number, got true",
        "sed: unknown key; did you mean 'seed'?",
        "data.limt: unknown key; did you mean 'limit'?",
        "data.limit: expected a number >= 1, got 0",
        f"model.name: expected one of {', '.join(MODELS)}, got 'lenet6'; did you mean 'lenet5'?",
        "method.lam: expected a number >= 0, got -1",
        "method.epochs: expected a whole number, got 'ten'",
        "method.lr: expected a finite number, got nan",
        "method.target: expected exactly one of flops, params, latency; got flops and params",
        "export.foo: unknown key; known here: int8, select_inputs",
    ):
        assert line in lines
    assert any(line.endswith("got 'mnist5'; did you mean 'mnist5k'?") for line in lines)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.epochs=true", "train.epochs: expected a whole number, got true"),
        ("train.epochs=2.0", "train.epochs: expected a whole number, got 2.0"),
        ("method.lam=true", "method.lam: expected a number, got true"),
        ("method.lam='1'", "method.lam: expected a number, got '1'"),
        ("method.lam=-.inf", "method.lam: expected a finite number, got -inf"),
        ("train.lr=1e31", "train.lr: expected a number <= 1e+30, got 1e+31"),
        ("threads=1000000", "threads: expected a number <= 1024, got 1000000"),
        (
            "method.curvature_scale=0",
            "method.curvature_scale: expected one of summed, consistent, paper, or a number >",
        ),
        (
            "method.curvature_scale=x",
            "method.curvature_scale: expected one of summed, consistent, paper, or a number >",
        ),
        ("seed=-1", "seed: expected a number >= 0, got -1"),
        ("seed=4294967296", "seed: expected a number < 4294967296, got 4294967296"),
        ("model=lenet5", "model: expected a mapping (key: value), got 'lenet5'"),
        ("method.groups=[]", "method.groups: expected at least one name, got an empty list"),
        ("method.groups=[row, row]", "method.groups: expected each name once, got row more than once"),
        ("data.augment=[flip, crop, flip]", "data.augment: expected each name once, got flip more than once"),
        ("method.target={}", "method.target: expected exactly one of flops, params, latency; got none"),
        ("method.target={latency: 0.5}", "method: target.latency: while a network shrinks only flops and params"),
        ("model.weights=''", "model.weights: expected text that is not empty, got ''"),
        ("model={}", "model: expected exactly one of name, torchvision, factory, timm; got none of them"),
        ("model.name=", "model: expected exactly one of name, torchvision, factory, timm; got none of them"),
        (
            "model={name: lenet5, timm: x}",
            "model: expected exactly one of name, torchvision, factory, timm; got name and timm",
        ),
        ("model.torchvision=''", "model.torchvision: expected text that is not empty, got ''"),
        ("model.torchvison=x", "model.torchvison: unknown key; did you mean 'torchvision'?"),
        ("model.args.width=3", "model: args: expected only with factory, got it with name"),
        ("model={factory: build}", "model.factory: expected my_package.my_module:build, got 'build'"),
        ("model={factory: 'a b:c'}", "model.factory: expected my_package.my_module:build, got 'a b:c'"),
        ("model={factory: 'a:b:c'}", "model.factory: expected my_package.my_module:build, got 'a:b:c'"),
        ("model={factory: .a:b}", "model.factory: expected my_package.my_module:build, got '.a:b'"),
        ("model={factory: 3}", "model.factory: expected text, got 3"),
        ("model={factory: a:b, args: 3}", "model.args: expected a mapping of text, finite numbers, true, false"),
        ("model={factory: a:b, args: {x: [.nan]}}", "model.args: expected a mapping of text, finite numbers"),
        ("model={factory: a:b, args: {x: {1: 2}}}", "model.args: expected a mapping of text, finite numbers"),
        ("model={factory: a:b, args: &x {x: *x}}", "nested too deeply, or an alias that contains itself"),
        (
            "model.shortcut=A",
            "model: shortcut: expected only with one of resnet20, resnet56, resnet18_cifar, got it with lenet5",
        ),
        ("model={name: resnet20, shortcut: C}", "model.shortcut: expected one of A, B, got 'C'"),
        ("model.fresh=linear", "model: fresh: expected only with weights"),
        ("data={}", "data.name: missing; expected one of mnist5k, mnist, fashion_mnist, "),
        ("method=", "method: expected a mapping (key: value), got nothing"),
        ("method={kind: given}", "method.path: missing; expected text"),
        ("method.lamb=1", "method.lamb: unknown key; did you mean 'lam'?"),
        ("foo.bar=1", "foo: unknown key; known here: seed, device"),
        ("train=", "train: missing; expected this section, or model.weights"),
        ("lam", "--set lam: expected key.path=value"),
        ("=1", "--set =1: expected key.path=value"),
        ("method..lam=1", "--set method..lam=1: expected key.path=value"),
        ("seed.x=1", "--set seed.x=1: seed is 0 and has no key x"),
        ("seed=[1", "--set seed=[1: line 1: "),
        (
            "data={name: synthetic, classes: 2, classes: 3}",
            "--set data={name: synthetic, classes: 2, classes: 3}: classes: ",
        ),
    ],
)
def test_one_fault(write: Write, override: str, line: str) -> None:
    assert told(write(GOOD), override).startswith(line)


def test_a_key_that_stands_twice_is_refused_with_its_line(write: Write) -> None:
    assert told(write(GOOD + "seed: 3\n")) == "seed: this key stands twice (line 10)"
    assert told(write(GOOD.replace("groups: filter", "lam: 2, groups: filter"))) == (
        "method.lam: this key stands twice (line 7)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping (key: value), got nothing"),
        ("- 1", "expected a mapping (key: value), got [1]"),
        ("a: [1\nb: 2", "line 2: "),
        ("a: 1\n\tb: 2", "line 2: "),
        ("a: !!int ten", "line 1: cannot read 'ten'"),
        ("a: !!python/object:os.system x", "line 1: "),
        ("a: 1\n---\nb: 1", "line 2: "),
        ("a: \x01", "line 1: the character"),
        ("[" * 800, "nested too deeply"),
    ],
)
def test_what_is_no_recipe_at_all_is_told_in_one_line(write: Write, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(write(text))
    assert message in str(caught.value)
    assert "my.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"cannot read recipe .*x\.yaml"):
        load_recipe(tmp_path / "x.yaml")


def test_a_recipe_that_contains_itself_is_refused(write: Write) -> None:
    lines = faults(write(GOOD.replace("data: {", "data: &d {limit: *d, ")))
    assert [line.partition(":")[0] for line in lines] == ["data.limit"]


# ---------------------------------------------------------------- overrides


def test_overrides_make_absent_sections_and_the_last_one_wins(write: Write) -> None:
    recipe = load_recipe(write(GOOD), ["method.target.flops=0.5", "seed=3", "method.target.flops=1e-1", "threads=2"])
    assert isinstance(recipe.method, Bayes)
    assert recipe.method.target is not None
    assert (recipe.method.target.flops, recipe.seed, recipe.threads) == (0.1, 3, 2)


def test_switching_a_union_drops_only_what_the_former_member_knew(write: Write) -> None:
    path = write(GOOD.replace("name: mnist5k", "name: mnist, root: somewhere, download: true"))
    recipe = load_recipe(path, ["data.classes=3", "data.name=synthetic"])
    assert recipe.data.name == "synthetic"
    assert recipe.data.augment == ("shift",)
    assert told(path, "data.name=synthetic", "data.root=x") == (
        "data.root: unknown key; known here: augment, limit, name, shape, classes, labels, train, validation, test"
    )
    typo = write(GOOD.replace("name: mnist5k", "name: mnist, rot: somewhere"))
    assert told(typo, "data.name=synthetic").startswith("data.rot: unknown key")


@pytest.mark.parametrize("setting", ["method.target=", "method.groups=[coupled, shape]"])
def test_a_budget_that_sets_the_pace_needs_a_target_and_whole_units(write: Write, setting: str) -> None:
    path = write(GOOD)
    good = ["method.control=budget", "method.target={flops: 0.5}"]
    method = load_recipe(path, good).method
    assert isinstance(method, Bayes) and method.control == "budget"
    assert told(path, *good, setting).startswith("method: control: budget")
    for only in ("method.falls_in=0.5", "method.within=norm", "method.reconstruct=true"):
        said = "method: scope, falls_in, within, reconstruct: expected only with control: budget"
        assert told(path, only).startswith(said)
    assert told(path, "method.epochs=0") == "method: epochs: expected at least 1 with control: lam"
    assert load_recipe(path, [*good, "method.epochs=0"]).method.epochs == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("value", ["1", "1.0", "1.9"])
def test_a_target_between_a_fraction_and_a_number_is_refused(value: str, write: Write) -> None:
    asked = told(write(GOOD), "method.kind=magnitude", f"method.target.flops={value}")
    assert asked.startswith(f"method.target: flops {float(value):g}: below 1 is a fraction of the cost")


def test_switching_the_method_drops_its_settings(write: Write) -> None:
    recipe = load_recipe(write(GOOD), ["method.kind=magnitude", "method.target.params=0.1"])
    assert set(recipe.method.model_dump(exclude_none=True)) == {
        "kind", "target", "scope", "round_to", "approximate", "batches", "reconstruct", "batch_size", "steps",
        "group_norm",
    }  # fmt: skip
    assert told(write(GOOD), "method.kind=magnitude", "method.target.flops=0.1", "method.lam=1").startswith(
        "method.lam:"
    )


def test_switching_the_network_drops_the_former_one_and_what_belongs_to_it(write: Write) -> None:
    path = write(GOOD)
    model = load_recipe(path, ["model.torchvision=resnet18"]).model
    assert (model.source, model.network, model.name) == ("torchvision", "resnet18", None)
    path = write(GOOD.replace("name: lenet5", "factory: mine:build, args: {width: 3}, weights: w.pt"))
    model = load_recipe(path, ["model.name=resnet20", "model.shortcut=B"]).model
    assert (model.network, model.args, model.shortcut, model.weights) == ("resnet20", {}, "B", "w.pt")
    model = load_recipe(path, ["model.factory=other:build", "model.args.depth=2"]).model
    assert (model.network, model.args) == ("other:build", {"width": 3, "depth": 2})
    assert told(path, "model.timm=x", "model.name=lenet5").endswith("got name and timm")
    assert told(path, "model.name=lenet5", "model.args.width=4").startswith("model: args: expected only with factory")
    assert load_recipe(path, ["model.torchvision="]).model.network == "mine:build"


def test_a_stage_may_name_its_own_augmentation(write: Write) -> None:
    path = write(GOOD)
    recipe = load_recipe(path, ["train.augment=[shift, flip]", "finetune.augment=[]"])
    assert recipe.train is not None and recipe.train.augment == ("shift", "flip") and recipe.finetune.augment == ()
    assert load_recipe(path, ["finetune.augment="]).finetune.augment is None
    assert told(path, "finetune.augment=shfit").startswith("finetune.augment: expected one of")


def test_train_may_be_left_out_only_where_weights_come_from_elsewhere(write: Write) -> None:
    path = write(GOOD)
    assert load_recipe(path, ["train=", "model.weights=w.safetensors"]).train is None
    fresh = ["train=", "method.kind=given", "method.path=slim.json", "method.fresh=true"]
    assert load_recipe(path, fresh).train is None
    assert told(path, *fresh[:-1]).startswith("train: missing")
    assert told(path, *fresh, "finetune.distill=0.5").startswith("finetune.distill: nothing to learn from")
    assert load_recipe(path, [*fresh, "finetune.distill=0.5", "model.weights=w.safetensors"]).finetune.distill == 0.5


def test_without_train_other_faults_are_listed_too(write: Write) -> None:
    assert [line.partition(":")[0] for line in faults(write(GOOD), "train=", "seed=-1")] == ["seed", "train"]


# ---------------------------------------------------------------- names of shipped recipes


def test_a_name_that_means_nothing_is_told_with_a_close_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a file nor a recipe that ships"):
        resolve("no_such_recipe_at_all")
    with pytest.raises(InputError, match="a folder, not a file"):
        resolve(tmp_path)


@pytest.mark.parametrize("name", list(shipped()))
def test_shipped_recipes_are_found_by_name_and_load(name: str) -> None:
    assert resolve(name) == resolve(f"{name}.yaml") == shipped()[name]
    load_recipe(name)


def test_a_file_comes_before_a_shipped_name(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(GOOD)
    monkeypatch.setattr("compressnas.recipe.shipped_recipes", lambda: {"mine": path})
    monkeypatch.chdir(path.parent)
    assert resolve("mine") == resolve("mine.yaml") == path
    Path("mine").write_text(GOOD)
    assert resolve("mine") == Path("mine")
    with pytest.raises(InputError, match="did you mean 'mine'"):
        resolve("mien")


# ---------------------------------------------------------------- properties

number = st.floats(min_value=1e-12, max_value=1e12)
texts = st.text(min_size=1)
augment = {"augment": st.lists(st.sampled_from(["shift", "nudge", "affine", "flip", "crop", "cutout"]), unique=True)}
cost = number.filter(lambda value: not 1 <= value < 2)  # neither a fraction nor a cost
target = st.one_of(st.fixed_dictionaries({"flops": cost}), st.fixed_dictionaries({"params": cost}))
arguments = st.dictionaries(
    texts,
    st.recursive(
        st.none() | st.booleans() | st.integers() | number | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
documents = st.fixed_dictionaries(
    {
        "data": st.one_of(
            st.fixed_dictionaries({"name": st.just("mnist5k")}, optional=augment),
            st.fixed_dictionaries({"name": st.just("npz"), "path": texts}, optional=augment),
            st.fixed_dictionaries({"name": st.just("cifar10")}, optional={"root": texts, "download": st.booleans()}),
            st.fixed_dictionaries(
                {"name": st.just("synthetic"), "shape": st.lists(st.integers(1, 64), min_size=3, max_size=3)}
            ),
        ),
        "model": st.one_of(
            st.fixed_dictionaries({"name": st.sampled_from(list(MODELS)), "weights": texts}),
            st.fixed_dictionaries(
                {"name": st.sampled_from(WITH_SHORTCUT), "weights": texts},
                optional={"shortcut": st.sampled_from("AB"), "fresh": st.lists(texts, unique=True)},
            ),
            st.fixed_dictionaries({"torchvision": texts, "weights": texts}),
            st.fixed_dictionaries({"timm": texts, "weights": texts}),
            st.fixed_dictionaries({"factory": st.just("a.b:c.d"), "weights": texts}, optional={"args": arguments}),
        ),
        "method": st.one_of(
            st.fixed_dictionaries({"kind": st.just("bayes")}, optional={"lam": number, "target": target}),
            st.fixed_dictionaries({"kind": st.just("magnitude"), "target": target}),
            st.fixed_dictionaries({"kind": st.just("given"), "path": texts}, optional={"fresh": st.booleans()}),
        ),
    },
    optional={
        "seed": st.integers(0, 2**32 - 1),
        "threads": st.none() | st.integers(1, 64),
        "train": st.fixed_dictionaries({}, optional={"epochs": st.integers(0, 10**6), "lr": number}),
    },
)


def reversed_keys(value: Any) -> Any:
    """The same document with the keys of every mapping in the opposite order."""
    return {k: reversed_keys(v) for k, v in reversed(value.items())} if isinstance(value, dict) else value


@small
@given(document=documents)
def test_the_resolved_recipe_loads_back_equal_and_only_content_makes_the_hash(
    document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    recipe = Recipe.model_validate(document)
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
    assert yaml.safe_load(to_yaml(recipe)) == recipe.model_dump(mode="json")  # other readers read it alike
    path.write_text("# a comment\n" + write_yaml(reversed_keys(document)), encoding="utf-8")
    assert recipe_hash(load_recipe(path)) == recipe_hash(recipe)
    changed = recipe.model_copy(update={"seed": recipe.seed + 1})
    assert recipe_hash(changed) != recipe_hash(recipe)
    assert len(recipe_hash(recipe)) == 16


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@small
@given(document=documents, data=st.data())
def test_whatever_stands_in_a_recipe_it_loads_or_is_refused_line_by_line(
    document: dict[str, Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    section = data.draw(st.sampled_from(["data", "model", "method"]))
    key = data.draw(st.sampled_from(list(document[section])) | st.text(max_size=5) | st.integers())
    broken = {
        **document,
        section: data.draw(anything) if data.draw(st.booleans()) else {**document[section], key: data.draw(anything)},
    }
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(write_yaml(broken), encoding="utf-8")
    try:
        load_recipe(path)
    except InputError as error:
        first, *lines = str(error).split("\n")
        assert first.startswith(f"recipe {path}: {len(lines)} fault")
        assert all(line.startswith((f"  {section}", "  train: missing")) for line in lines)
