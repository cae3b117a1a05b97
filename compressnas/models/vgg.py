"""VGG-16 with batch norm for images of CIFAR's size (Simonyan and Zisserman, arXiv 1409.1556, configuration D)."""

from collections import OrderedDict

from torch import nn

from compressnas.errors import InputError

_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # a pooling after each part


def vgg16_bn_cifar(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Thirteen 3 x 3 convolutions and one linear layer; 14,728,266 parameters on 3 channels and 10 classes.

    Args:
        shape: (C, H, W) of one image.
        classes: number of outputs.

    Raises:
        InputError: the image is smaller than 32 x 32, so that nothing would be left after the fifth pooling.
    """
    channels, height, width = shape
    if min(height, width) < 32:
        raise InputError(f"vgg16_bn_cifar needs images of at least 32 x 32 pixels, got {height} x {width}")
    layers: list[nn.Module] = []
    for part in _WIDTHS:
        for outputs in part:
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*layers),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(channels, classes),
        )
    )
