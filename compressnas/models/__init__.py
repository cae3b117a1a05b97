"""Networks that a recipe can name: ours, torchvision's, timm's, the user's own."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from compressnas.coupling import one_line
from compressnas.errors import InputError
from compressnas.models.factory import factory_network
from compressnas.models.lenet import lenet5, lenet300_100
from compressnas.models.resnet import resnet18_cifar, resnet20, resnet56
from compressnas.models.vgg import vgg16_bn_cifar
from compressnas.models.zoo import timm_network, torchvision_network
from compressnas.recipe import Model

Shape = tuple[int, int, int]

BUILDERS: dict[str, Callable[..., nn.Module]] = {  # (shape, classes), and `shortcut` for those that have one
    "lenet5": lenet5,
    "lenet300_100": lenet300_100,
    "resnet20": resnet20,
    "resnet56": resnet56,
    "resnet18_cifar": resnet18_cifar,
    "vgg16_bn_cifar": vgg16_bn_cifar,
}


def _ours(settings: Model, shape: Shape, classes: int) -> nn.Module:
    options = {} if settings.shortcut is None else {"shortcut": settings.shortcut}
    return BUILDERS[settings.network](shape, classes, **options)


SOURCES: dict[str, Callable[[Model, Shape, int], nn.Module]] = {
    "name": _ours,
    "torchvision": lambda settings, shape, classes: torchvision_network(settings.network, shape, classes),
    "factory": lambda settings, shape, classes: factory_network(settings.network, settings.args),
    "timm": lambda settings, shape, classes: timm_network(settings.network, shape, classes),
}


def build_network(settings: Model, shape: Shape, classes: int) -> nn.Module:
    """The network that a recipe's model section names, untrained; it has been seen to give one output per class.

    Args:
        settings: the section; its `weights` are not read here.
        shape: (C, H, W) of one image.
        classes: number of classes of the data.

    Raises:
        InputError: there is no such network, it cannot be built, or it does not fit the images or the classes.
    """
    model = SOURCES[settings.source](settings, shape, classes)
    _check_outputs(model, f"model.{settings.source}: {settings.network}", shape, classes)
    return model


def _check_outputs(model: nn.Module, name: str, shape: Shape, classes: int) -> None:
    """Refuse a network that does not turn two images into (2, classes). Raises InputError."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(2, *shape))
    except Exception as error:  # whatever the network itself raises
        message = f"{name} cannot read images of shape {shape}: {type(error).__name__}: {one_line(error)}"
        raise InputError(message) from error
    finally:
        for module, training in modes:
            module.training = training
    if not isinstance(output, Tensor):
        raise InputError(f"{name} returns a {type(output).__name__}; expected one tensor (B, classes)")
    if output.shape != (2, classes):
        raise InputError(
            f"{name} makes {tuple(output.shape)} of 2 images of shape {shape}; expected (2, {classes}), since the data"
            f" have {classes} classes"
        )
