"""The model that all engines of a router must have, and why an engine with another one cannot join."""

from collections.abc import Mapping
from dataclasses import dataclass

from weft.cluster.cluster_messages import EngineAbout
from weft.version import VERSION


@dataclass(frozen=True)
class RouterModel:
    """The model that all engines of a router must have.

    ``fingerprint``: hash of its configuration and weights. ``vocab``: number of token ids. ``embed``: elements of an
    embedding. ``adapters``: hash of each adapter, by name. ``scores``: whether it is a reward model.
    """

    fingerprint: str
    vocab: int
    embed: int
    adapters: Mapping[str, str]
    scores: bool = False

    def refusal(self, about: EngineAbout) -> str:
        """Return why an engine that says ``about`` of itself cannot join, or an empty string."""
        if about.version != VERSION:
            return f"it runs Weft {about.version}, and the router {VERSION}; install the same version"
        if about.fingerprint != self.fingerprint:
            return "its model has other weights or another configuration than the router's; give both the same"
        for name, digest in about.adapters.items():
            if self.adapters.get(name, digest) != digest:
                return f"its adapter {name!r} has other weights than the router's; give both the same"
        return ""
