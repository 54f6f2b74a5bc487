"""Predicts the seconds of an engine's step on devices that nobody has timed, and the tokens that its cache holds.

A step reads the weights once, and the keys and values of all texts; it multiplies for every token, and attends for
every pair of a query and a key. Reading and multiplying run at the same time, so a step takes as long as the slower of
both (the roofline of Williams et al. 2009). With tensor parallelism every layer adds two all-reduces.
"""

from dataclasses import dataclass

import numpy as np

from weft.planner.machine import Machine
from weft.shapes.shape import Shape

#: Share of a device's memory that weights and cache may fill; the rest is for activations and the runtime.
FILLED = 0.9
#: Bytes of a weight, of a key's element, and of an activation.
WIDTH = 2


@dataclass(frozen=True)
class EnginePrice:
    """Predicts how long the steps of an inference engine take, and how many tokens its cache holds.

    The engine runs a model of ``shape`` on ``ranks`` devices of ``machine`` with tensor parallelism.
    """

    shape: Shape
    machine: Machine
    ranks: int = 1

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's keys and values, over all layers and ranks."""
        return float(self.shape.cache_bytes)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds beside the weights; 0 if the weights alone do not fit."""
        free = self.ranks * FILLED * float(self.machine.memory) - self._weight_bytes
        return max(0, int(free / self.token_bytes))

    @property
    def _weight_bytes(self) -> float:
        return WIDTH * float(self.shape.parameters)

    def step_seconds(
        self, tokens: float, texts: float, rows: float, keys: float, pairs: float
    ) -> float:
        """Return the seconds of one generation step of the engine.

        ``tokens``: number of tokens that the step computes. ``texts``: number of texts to which these tokens belong.
        ``rows``: number of tokens for which logits are computed. ``keys``: number of cached tokens whose keys and
        values are read. ``pairs``: number of pairs of a query and a key in attention, per head.
        """
        shape, machine = self.shape, self.machine
        layers, embed = float(shape.layers), float(shape.embed)
        table = float(shape.vocab) * embed
        products = 2 * (float(shape.active_parameters) - table) * tokens + 2 * table * rows  # fmt: skip
        flops = products / float(machine.peak * machine.clock)
        attention = 4 * layers * float(shape.heads * shape.score_dim) * pairs
        compute = flops + attention / float(machine.peak16 * machine.clock)
        moved = self._read_bytes(tokens) + keys * self.token_bytes
        reading = moved / float(machine.hbm)
        return max(compute, reading) / self.ranks + self._reductions(tokens)

    def _read_bytes(self, tokens: float) -> float:
        """Return the bytes of weights that a step reads; of experts, those that its tokens choose."""
        shape = self.shape
        experts = float(shape.parameters) - float(shape.active_parameters)
        if not experts:
            return self._weight_bytes
        chosen = float(shape.top_k) / max(1.0, float(shape.experts))
        share = 1 - (1 - chosen) ** tokens
        always = float(shape.active_parameters) - experts * chosen / (1 - chosen)
        return WIDTH * (always + share * (float(shape.parameters) - always))

    def _reductions(self, tokens: float) -> float:
        """Return the seconds of the all-reduces of all layers."""
        if self.ranks == 1:
            return 0.0
        machine = self.machine
        near = self.ranks <= float(np.max(machine.domain))
        rate = float(machine.link if near else machine.network)
        latency = float(machine.link_latency if near else machine.network_latency)
        sent = 2 * (self.ranks - 1) / self.ranks * tokens * float(self.shape.embed)
        return 2 * float(self.shape.layers) * (latency + WIDTH * sent / rate)
