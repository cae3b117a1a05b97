"""LeNet-300-100 and LeNet-5 (20-50-800-500) with ReLU: the networks of the Bayesian pruning papers."""

from collections import OrderedDict

from torch import nn

from compressnas.errors import InputError


def lenet5(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """LeNet-5 as Caffe has it: 20 and 50 filters of 5 x 5, each followed by 2 x 2 max-pooling, then 500 neurons.

    Args:
        shape: (C, H, W) of one image; (1, 28, 28) gives the 20-50-800-500 of the papers.
        classes: number of outputs.

    Raises:
        InputError: the image is smaller than 16 x 16, so that nothing would be left after the second pooling.
    """
    channels, height, width = shape
    if min(height, width) < 16:
        raise InputError(f"lenet5 needs images of at least 16 x 16 pixels, got {height} x {width}")
    features = 50 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 20, 5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),  # after the pooling: the same values from a quarter of the elements
            conv2=nn.Conv2d(20, 50, 5),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(features, 500),
            relu3=nn.ReLU(),
            fc2=nn.Linear(500, classes),
        )
    )


def lenet300_100(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """LeNet-300-100: two hidden layers on the flattened image.

    Args:
        shape: (C, H, W) of one image.
        classes: number of outputs.
    """
    channels, height, width = shape
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(channels * height * width, 300),
            relu1=nn.ReLU(),
            fc2=nn.Linear(300, 100),
            relu2=nn.ReLU(),
            fc3=nn.Linear(100, classes),
        )
    )
