"""``weft client``: train on this machine's own data for a server, which gets what was learned and never the data."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import DataPath, FromModel, LayoutText, Overrides

_join = "The invitation that weft train prints for a recipe with federated.listen, or the file that holds it."
_name = (
    "This client's name at the server; by default that of the machine and of the data."
)
_out = "This client's folder; with the same folder it comes back as the same client."


def client_command(
    join: Annotated[str, typer.Option("--join", metavar="INVITATION", help=_join)],
    data: DataPath = None,
    name: Annotated[str, typer.Option(help=_name)] = "",
    origin: FromModel = None,
    layout: LayoutText = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help=_out)] = None,
) -> int:
    """Train as a client of a server, on data that never leave this machine. Run it again to go on after a stop."""
    from weft.cli.train import train_command
    from weft.federated.client_recipe import check_offer, default_name, prepare_place
    from weft.recipe import load_recipe
    from weft.writable import check_writable

    if out is not None:
        check_writable(out, "--out", folder=True)
    place = prepare_place(join, name or default_name(data), out)
    own = list(overrides or ())
    check_offer(load_recipe(place.recipe, own, layout, origin, data), place.offer, own)
    # ranks, if there are several, are started with this command line
    sys.argv[1:] = [
        "train", str(place.recipe), *(word for each in own for word in ("--set", each)),
        *(["--layout", layout or ""]), *(["--from", origin] if origin else []), *(["--data", data] if data else []),
        "--out", str(place.run), "--resume", "auto",
    ]  # fmt: skip
    return train_command(
        place.recipe, layout or "", own, origin, data, place.run, resume="auto"
    )
