"""Networks of torchvision and timm, by name. The only file that knows them as models. Nothing is ever downloaded."""

from torch import nn

from compressnas.coupling import one_line
from compressnas.errors import InputError
from compressnas.faults import suggestion

# These return several outputs while they train, and warn about how they draw their weights, unless told otherwise.
_OPTIONS = {name: {"aux_logits": False, "init_weights": False} for name in ("googlenet", "inception_v3")}


def torchvision_network(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A classification model of torchvision, untrained.

    Args:
        name: as `torchvision.models.get_model` has it.
        shape: (C, H, W) of one image; C must be 3.
        classes: number of outputs.

    Raises:
        InputError: torchvision has no such classification model, or the images have another number of channels.
    """
    from torchvision import models  # here, since the import takes seconds and most networks do without

    known = models.list_models(module=models)
    if name not in known:
        close = suggestion(name, known) or f"; it has {', '.join(known[:6])} and {len(known) - 6} more"
        raise InputError(f"model.torchvision: torchvision has no classification model {name!r}{close}")
    if shape[0] != 3:
        raise InputError(f"model.torchvision: {name} reads images of 3 channels, and the data's have {shape[0]}")
    network: nn.Module = models.get_model(name, weights=None, num_classes=classes, **_OPTIONS.get(name, {}))
    return network


def timm_network(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A model of timm, untrained.

    Args:
        name: as `timm.create_model` has it.
        shape: (C, H, W) of one image.
        classes: number of outputs.

    Raises:
        InputError: timm is not installed, has no such model, or cannot build it for these images.
    """
    try:
        import timm
    except ImportError as error:
        raise InputError(f"model.timm: {name} needs timm, which is not installed here: pip install timm") from error
    known = timm.list_models()
    if name.partition(".")[0] not in known:  # what follows a point names pretrained weights, which are not fetched
        raise InputError(f"model.timm: timm has no model {name!r}{suggestion(name, known)}")
    try:
        network: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=shape[0])
    except Exception as error:  # a hundred authors' constructors
        raise InputError(f"model.timm: {name} cannot be built for {shape[0]} channels: {one_line(error)}") from error
    return network
