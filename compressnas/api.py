"""Calls of the library that differ from what a run does."""

from dataclasses import replace

from torch import nn

from compressnas import surgery
from compressnas.inputs import Inputs
from compressnas.interface import more_samples, samples
from compressnas.proof import Proof
from compressnas.slim import SlimArch

PROOF_SAMPLES = 8


def remove(
    model: nn.Module, example_inputs: Inputs, slim: SlimArch, inputs: Inputs | None = None
) -> tuple[nn.Module, Proof]:
    """Remove what was decided, and prove that the result is the network with these groups masked.

    Args:
        model: the trained network; not changed.
        example_inputs: a tensor (B, ...), a tuple of arguments or a mapping of named ones.
        slim: the decision, of `decide` or of a file.
        inputs: what the proof runs on, shaped like `example_inputs` with any batch size; by default the example
            itself and random inputs like it, 8 samples at least.

    Returns:
        The small network, an ordinary module, and the proof: its `verdict`, the difference found, and which group
        sets were left alone since removing them could not be proved.

    Raises:
        InputError: the decision does not fit the network, or the network cannot be traced.
        RunFailed: there is something to remove, and no part of it can be proved.
    """
    if inputs is None:
        inputs = more_samples(example_inputs, max(PROOF_SAMPLES, samples(example_inputs)))
    small, _, _, proof = surgery.remove(model, example_inputs, slim, inputs)
    return small, replace(proof, images=samples(inputs))
