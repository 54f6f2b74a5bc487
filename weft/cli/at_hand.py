"""Planning for the machine at hand: ``weft plan`` and ``weft train`` on a cluster file that ``weft probe`` wrote."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from weft.errors import UsageError
from weft.model_shape import Shape, shape_of
from weft.planner.at_hand import Rehearsed, at_hand
from weft.planner.choose import Choice, demands, laid, settled
from weft.planner.cost import BITS
from weft.planner.engine import ENGINES
from weft.planner.finalists import Final
from weft.planner.local import Local
from weft.planner.machine import Cluster
from weft.planner.search import Found, Pin, search
from weft.planner.shape import vocab_of
from weft.recipe import Recipe
from weft.train.rehearse import batches_of, every_rank
from weft.train.setup import model_shape

#: Parameters times ranks beyond which rehearsals, which allocate what they compute on, would take long.
LARGEST = 2e9


def search_here(
    recipe_of: Callable[[Final], Recipe], shape: Shape, cluster: Cluster, ranks: int | None, batch: int, seq: int,
    bits: int, pins: Sequence[Pin], say: Callable[[str], None],
) -> tuple[Found, list[Final], str]:  # fmt: skip
    """The best layouts on the probed machine, of ``ranks`` or else of every number of ranks that was probed; the
    search of the winner's number; and what was compared. ``recipe_of``: what a layout is rehearsed with."""
    if float(shape.parameters) * (ranks or cluster.count) > LARGEST:
        raise UsageError(
            f"the model has {float(shape.parameters) / 1e9:.1f} B parameters: too many to rehearse on a CPU; plan for "
            "GPUs, e.g. --cluster h100 --gpus 8"
        )
    local = Local.of(cluster.calibration)
    counts = [ranks] if ranks else [n for n in local.settings if n <= cluster.count]
    founds, refusal = [], None
    for n in counts:
        engine = replace(ENGINES["weft"], constant=local.setting(n).memory["plain"] / 2**30)
        memory = (cluster.memory or 16) * cluster.count / n
        share = {"memory": memory, "bf16": (cluster.bf16 or 0.05) / n, "hbm": (cluster.hbm or 20) / n}
        mine = cluster.model_copy(update={"count": n, "per_node": min(n, cluster.per_node)} | share)
        try:
            founds.append(search(shape, mine, engine, batch, seq, bits, pins))
        except UsageError as error:
            refusal = error
    if not founds:
        raise refusal or UsageError("no number of ranks was probed; run weft probe again")
    with _one_thread():
        found, finals = at_hand(founds, local, recipe_of, _rehearse, say)
    return found, finals, f"of {len(finals)} rehearsed layouts of {' or '.join(map(str, counts))} ranks"


def choose_here(recipe: Recipe, cluster: Cluster, ranks: int | None, say: Callable[[str], None]) -> Choice:
    """The fastest layout for ``recipe`` on the probed machine; what its ``[train]`` section says stays."""
    train = recipe.train
    shape = shape_of(model_shape(recipe), vocab_of(recipe))
    _, finals, among = search_here(
        lambda final: laid(recipe, final)[0], shape, cluster, ranks, train.batch, recipe.data.seq_len,
        BITS[train.dtype], demands(recipe, cluster), say,
    )  # fmt: skip
    return settled(recipe, finals, among)


def _rehearse(recipe: Recipe) -> Rehearsed:
    """Every rank's step, on the recipe's own first batch if its data is there."""
    shape, batches = batches_of(recipe)
    return every_rank(recipe, shape, lambda mesh: batches(mesh, 0))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Rehearsals compute on one thread: their operators are counted, not timed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
