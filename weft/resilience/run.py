"""One rank's way through a run that may lose ranks or islands: started with the others, or joining later."""

from pathlib import Path

from weft.recipe import Recipe, build_recipe
from weft.resilience.roster import read_roster
from weft.train.training import Ending


def survive(recipe: Recipe, out: Path | None, resume: str | None) -> Ending:
    """Train as one of the ranks that were started together, in a run that survives the loss of ranks or islands.

    ``recipe``: the run's recipe; ``out``: the run folder, or None for the default; ``resume``: "auto" (the run's newest
    checkpoint, if it has one), a run or a checkpoint to continue from, or None for a new run. Returns how the training
    has ended.
    """
    if recipe.islands_come_and_go:
        from weft.resilience.island_life import start_island

        return start_island(recipe, out, resume)
    from weft.resilience.rank_life import start_rank

    return start_rank(recipe, out, resume)


def join_run(folder: Path) -> Ending:
    """Join the run in ``folder`` as one more rank, and train. Returns how the training has ended.

    If ``folder`` is that of an island, this process becomes a rank of the island.
    """
    roster = read_roster(folder)
    recipe = build_recipe(roster.about["recipe"])
    if "island" in roster.about:
        from weft.resilience.island_life import return_island

        return return_island(recipe, folder, roster)
    from weft.resilience.rank_life import join_rank

    return join_rank(recipe, folder, roster)
