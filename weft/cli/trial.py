"""The ranks of a layout that is tried out: ``python -m weft.cli.trial RECIPE OUT``, started by :func:`start`."""

import subprocess
import sys
from pathlib import Path

from weft.recipe import load_recipe
from weft.train.failure import leave, report_failure
from weft.train.launch import in_ranks, launch, part_ranks, set_threads

#: Seconds after which a trial of one rank is given up.
PATIENCE_S = 300.0


def start(recipe: Path, out: Path, world: int) -> int:
    """Run ``world`` ranks of this module and return their exit code."""
    command = [sys.executable, "-m", "weft.cli.trial", str(recipe), str(out)]
    if world > 1:
        return launch([], world, command)
    try:
        return subprocess.run(command, timeout=PATIENCE_S).returncode
    except subprocess.TimeoutExpired:
        return 124


def be_rank(path: Path, out: Path) -> None:
    """Join the others, train some steps, and part."""
    from weft.rehearse import trial
    from weft.train.launch import join
    from weft.train.setup import device_type

    recipe = load_recipe(path)
    set_threads(recipe.train.threads, recipe.layout.world)
    device = device_type(recipe)
    join(device, recipe.train.timeout)
    trial.be_rank(recipe, device, out)
    part_ranks()


def main() -> int:
    in_ranks()
    try:
        be_rank(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # told once, by the launcher
        return report_failure(error)
    leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
