"""What the actions of a microbatch take on one rank."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Per rank and microbatch, in any unit; a rank with v chunks spends ``forward / v`` on each. ``move``: per hop."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    move: float = 0.0


EQUAL = Times()
