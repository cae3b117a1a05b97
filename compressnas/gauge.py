"""Whether a network that loses its groups one by one is within its budget."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from compressnas.budget import Budget, fewest, uniform
from compressnas.groups import GroupSet
from compressnas.inputs import Inputs
from compressnas.measure import cost
from compressnas.surgery import removed_network

CORRECTIONS = 12  # times that the best groups are chosen again, with what the last choice really cost
CAUTION = 0.5  # part of what a network costs too much that its meter has to fall before it is counted again
STEP = 0.002  # part of what the meter reads that it has to fall at least


class Gauge:
    """The meter of a network, put right by what removed networks really cost.

    A meter knows convolutions, linear layers and projections of attention: fast, for every step of training. Norms and
    products of activations cost, too. So when the meter says that a network is within its budget, it is built without
    its groups and counted. If it is not, the meter has to fall a part of the way before that is done again.

    Attributes:
        limit: of the budget; math.inf where there is none.
        goal: what the meter may read.
    """

    def __init__(self, budget: Budget, model: nn.Module, sets: Sequence[GroupSet], example: Inputs) -> None:
        self.kind, self.limit = budget.kind, budget.limit
        self._model, self._sets, self._example = model, sets, example
        self.meter = budget.meter(model, sets, example)
        self.goal = self.limit

    def met(self, alive: Mapping[str, Tensor]) -> bool:
        """Whether the network costs no more than the limit with these groups only, group set -> (G,) bool."""
        if self.limit == math.inf:
            return True
        read = self.meter(alive)
        if read > self.goal:
            return False
        real = self.cost(removed_network(self._model, self._example, self._sets, alive))
        if real > self.limit:
            self.goal = _lowered(read, real, self.limit)
        return real <= self.limit

    def fewest(
        self,
        alive: Mapping[str, Tensor],
        scores: Mapping[str, Tensor],
        limit: float | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> dict[str, Tensor]:
        """Without the groups of the lowest score per cost, so that the limit is met, or as near as can be.

        Args:
            limit: takes the place of the budget's, where that is not to be met yet.
            sizes: all sets keep the same part of so many groups, those of the highest score, whatever they cost.
        """
        limit = self.limit if limit is None else limit
        goal = limit
        for _ in range(CORRECTIONS):
            left = uniform(self.meter, alive, scores, goal, sizes) if sizes else fewest(self.meter, alive, scores, goal)
            real = self.cost(removed_network(self._model, self._example, self._sets, left))
            if real <= limit:
                break
            goal = _lowered(self.meter(left), real, limit)
        return left

    def cost(self, network: nn.Module) -> float:
        """What a network costs, in the budget's kind."""
        return float(getattr(cost(network, self._example), self.kind))


def _lowered(read: float, real: float, limit: float) -> float:
    """What a meter may read next, when a network at which it reads `read` costs `real`, more than the limit."""
    return read - read * max((1 - limit / real) * CAUTION, STEP)
