"""What a network can cost at all: a table to read before a budget is set and anything is trained."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from compressnas.baselines import Evidence
from compressnas.choice import choices
from compressnas.errors import InputError
from compressnas.inputs import Inputs
from compressnas.measure import Evaluate, cost
from compressnas.surgery import Found, removed_network


@dataclass(frozen=True)
class Reachable:
    """A network in which every layer keeps the same part of its channels.

    Attributes:
        asked: the part that is asked for; rounding, the fewest channels and what is left alone keep more.
        channels: the part of the prunable channels that is kept.
        flops, params: what the network then costs.
        flops_kept, params_kept: relative to the dense network.
        metric: what `evaluate` gave for it, not trained on; None without one.
    """

    asked: float
    channels: float
    flops: int
    params: int
    flops_kept: float
    params_kept: float
    metric: float | None = None


def reachable(
    model: nn.Module,
    example_inputs: Inputs,
    round_to: int = 1,
    ignore: Sequence[str] = (),
    min_channels: int = 1,
    steps: int = 10,
    groups: Found | None = None,
    evaluate: Evaluate | None = None,
    approximate: bool = False,
) -> tuple[Reachable, ...]:
    """What is left of the cost when all layers keep the same part of their channels, from everything to the least.

    A target below the last line cannot be met. Between the lines one can: there layers keep different parts. The
    networks are built and counted, not proved.

    Args:
        model: the network, trained or not; not changed.
        example_inputs: a tensor, a tuple of arguments or a mapping of named ones.
        round_to, ignore, min_channels: as in `decide`.
        steps: lines below the dense network's.
        groups: what `find_groups(model, example_inputs)` gave, where it was called already.
        evaluate: takes each of the networks, in eval mode, gradients off, and gives any metric of it. The channels of
            the largest L2 norm stay.
        approximate: as in `decide`.

    Raises:
        InputError: a value is out of range, the network cannot be traced, nothing of it can be pruned, or `evaluate`
            gives no number.
    """
    if steps < 1:
        raise InputError(f"steps {steps}: expected a whole number of at least 1")
    choice = choices(
        model, example_inputs, "magnitude", Evidence(), round_to, ignore, min_channels, groups, approximate
    )
    dense, all_channels = cost(model, example_inputs), choice.all_channels({})
    lines = []
    for step in range(steps, -1, -1):
        alive = choice.best(choice.uniform(step / steps))
        small = removed_network(model, example_inputs, choice.sets, alive, choice.coupled)
        own = cost(small, example_inputs, evaluate)
        kept = (own.flops / dense.flops, own.params / dense.params)
        lines.append(
            Reachable(step / steps, choice.channels(alive) / all_channels, own.flops, own.params, *kept, own.metric)
        )
    return tuple(lines)
