"""A trained network goes in, the slimmest verified ONNX model comes out, with the price of every FLOP saved."""

__version__ = "0.1.0"
