"""NanoFlow (Zhu et al. 2024, 2408.12757): nano-batches whose number, order and sizes a search finds by measuring."""

from __future__ import annotations

from weft.models.token_parts import WHOLE_ROWS, Overlap, PassTokens, Weave
from weft.registry import register
from weft.techniques.overlaps.nano.nano_search import NanoSearch


@register(
    "overlap",
    "nano",
    title="NanoFlow: nano-batches by search",
    paper="Zhu et al. 2024",
    rules=WHOLE_ROWS,
    recipe="overlap.toml --layout tp=2,overlap=nano",
    proof="tests/techniques/test_overlaps.py",
    figure="equal to 1e-10 with every choice; over links of 2 ms and 200 Mbit/s a step of two ranks is 1.76x, a long "
    "prompt 1.898x; what it chose took `1.015` of the best of its choices (`bench/overlap.py`)",
)
class NanoBatches(Overlap):
    """Tries several ways to cut a pass into nano-batches in the first passes of a run, and then uses the fastest (Zhu
    et al. 2024). Passes with about equally many tokens share a search. The ranks of ``tp`` agree on the time of each
    trial, the time of the slowest rank. All ways compute the same, up to rounding.
    """

    def __init__(self) -> None:
        #: By the size of a pass, as the number of its bits, and whether backward follows.
        self.searches: dict[tuple[int, int, bool], NanoSearch] = {}

    def __call__(self, tokens: PassTokens) -> Weave:
        if tokens.asked == 1:
            return Weave(tokens.whole, NanoSearch.ORDERS["turns"])
        return self._search(tokens).choice.weave(tokens)

    def awaits(self, tokens: PassTokens) -> bool:
        return tokens.asked != 1 and self._search(tokens).trying

    def took(self, tokens: PassTokens, weave: Weave, seconds: float) -> None:
        search = self._search(tokens)
        if weave == search.choice.weave(tokens):
            search.note(seconds)

    def _search(self, tokens: PassTokens) -> NanoSearch:
        key = tokens.rows, tokens.tokens.bit_length(), tokens.learns
        if key not in self.searches:
            self.searches[key] = NanoSearch(tokens)
        return self.searches[key]
