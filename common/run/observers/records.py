"""The facts that every observer is given at every moment of a run."""

import dataclasses
from collections.abc import Mapping

from common.checkpoints.position import Position
from common.run.plan import Plan
from common.run.results import Results


@dataclasses.dataclass(frozen=True)
class Facts:
    position: Position
    plan: Plan  # whose `resumed_at` is None until the run has resumed
    results: Results
    seconds: Mapping[str, float]  # as Clock.read() gives them
