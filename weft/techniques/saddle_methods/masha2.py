"""MASHA2: differences of operators through contractive compressors, errors fed back (Beznosikov et al. 2022)."""

from __future__ import annotations

from weft.registry import register
from weft.saddle.masha import Masha, MashaSettings


@register(
    "saddle-method",
    "masha2",
    title="MASHA2: saddle points by contractive compressed differences, errors fed back",
    paper="Beznosikov et al. 2022",
    recipe="saddle.toml --set saddle.method=masha2 --set saddle.compress=topk:0.2",
    proof="tests/saddle/test_masha.py",
    figure=(
        "over four ranks with `int4` at `9.73e-15` of the first distance after `0.1491` MB, `1.92` whole; with a fifth "
        "of the elements at `0.000835`, where compressed operators stay at `0.5` or more (`bench/saddle.py`)"
    ),
    settings=MashaSettings,
)
class Masha2(Masha):
    """Sends differences of operators (the gradients of both players) by any compressor (Beznosikov et al. 2022). What
    compression loses is added to the next message, in both directions.
    """

    feedback = True
