"""One rank's way through a run from which ranks, or whole islands, may be lost: as it starts, or joins others later."""

from pathlib import Path

from weft.recipe import Recipe, build_recipe
from weft.resilience.roster import read_roster
from weft.train.training import Ending


def survive(recipe: Recipe, out: Path | None, resume: str | None) -> Ending:
    """Train as one of the ranks that were started."""
    if recipe.islands_come_and_go:
        from weft.resilience.island_life import start_island

        return start_island(recipe, out, resume)
    from weft.resilience.rank_life import start_rank

    return start_rank(recipe, out, resume)


def join_run(folder: Path) -> Ending:
    """Join the run in ``folder`` as one more rank, or as a rank of the island whose folder it is."""
    roster = read_roster(folder)
    recipe = build_recipe(roster.about["recipe"])
    if "island" in roster.about:
        from weft.resilience.island_life import return_island

        return return_island(recipe, folder, roster)
    from weft.resilience.rank_life import join_rank

    return join_rank(recipe, folder, roster)
