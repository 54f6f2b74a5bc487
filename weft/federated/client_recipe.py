"""From an invitation to a client's recipe: the server's offer, with the client's own data and settings."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import UsageError, WeftError
from weft.paths import real_path
from weft.recipe.toml import write_toml

if TYPE_CHECKING:
    from weft.net.wire import Head
    from weft.recipe import Recipe

#: Files and folders of a client: the recipe, the invitation, the server's tokenizer, and the folder of its run.
RECIPE, INVITATION, TOKENIZER, RUN = "recipe.toml", "invitation", "tokenizer", "run"
#: Steps of a client, which is more than any server asks for.
MANY = 10**9


@dataclass(frozen=True)
class ClientPlace:
    """Folder of a client with its recipe and run, and the server's offer.

    Attributes:
        ``folder``: the client's folder.
        ``recipe``: its recipe.
        ``run``: the folder of its run.
        ``offer``: the server's message with its recipe.
    """

    folder: Path
    recipe: Path
    run: Path
    offer: Head


def default_name(data: str | None) -> str:
    """Return a name for a client of this machine, from the machine's name and the path ``data`` of its data."""
    stem = re.sub(r"[^\w.-]", "-", Path(data).stem) if data else "client"
    return f"{platform.node()}-{stem}"[:64]


def ask_offer(where: str) -> tuple[Head, dict[str, bytes]]:
    """Ask the server of an invitation for its recipe. Returns the offer, and the tokenizer's files by name.

    ``where``: the invitation, or the file with it. Raises :class:`WeftError` if the server does not answer.
    """
    from weft.federated.client_dialler import dialler
    from weft.federated.federated_facts import offered_files
    from weft.federated.server_invitation import read_server_invitation

    invitation = read_server_invitation(where)
    try:
        connection = dialler(where, "auto")({"asks": "recipe"})
        try:
            frame = connection.receive(limit=60.0)
        finally:
            connection.close()
    except OSError as error:
        raise WeftError(
            f"the server at {invitation.where} does not answer ({error}); does `weft train` run there, can this "
            "machine reach it, and is the invitation of this run?"
        ) from None
    if frame.head.get("kind") != "recipe" or not isinstance(
        frame.head.get("recipe"), dict
    ):
        raise WeftError(
            f"the server at {invitation.where} has sent no recipe; is it of another version of Weft?"
        )
    return frame.head, offered_files(frame.payload)


def prepare_place(where: str, name: str, out: Path | None) -> ClientPlace:
    """Write a client's recipe, from the server's offer, into the client's folder, and return the folder with both.

    ``where``: the invitation, or the file with it. ``name``: the client's name. ``out``: the client's folder; None:
    ``runs/RECIPE-NAME``.
    """
    from weft.recipe import RUNS

    head, files = ask_offer(where)
    tree: dict[str, Any] = head["recipe"]
    folder = out or RUNS / f"{tree.get('name', 'federated')}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    text = where if "://" in where else Path(where).read_text()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(folder / INVITATION, flags, 0o600), "w") as file:
        file.write(text.strip() + "\n")
    if b'"kind": "bytes"' not in files.get("tokenizer.json", b"") and not tree.get(
        "model", {}
    ).get("from"):
        (folder / TOKENIZER).mkdir(exist_ok=True)
        for file_name, content in files.items():
            (folder / TOKENIZER / file_name).write_bytes(content)
        tree.setdefault("data", {})["tokenizer"] = str(real_path(folder / TOKENIZER))
    tree["data"] = {"validation": 0, **tree.get("data", {})}
    tree["validation"] = {"every": 0}
    tree["train"] = {**tree.get("train", {}), "steps": MANY}
    tree["federated"] |= {"join": str(real_path(folder / INVITATION)), "name": name}
    (folder / RECIPE).write_text(write_toml(tree))
    return ClientPlace(folder, folder / RECIPE, folder / RUN, head)


def check_offer(recipe: Recipe, offer: Head, overrides: Sequence[str]) -> None:
    """Refuse a client's recipe that contradicts the server's offer.

    ``overrides``: the client's own settings, which the error line names. Raises :class:`UsageError`.
    """
    from weft.checkpoint.resume_check import model_differences
    from weft.recipe import ModelShape, build_recipe
    from weft.recipe.federated_travel import AGREED
    from weft.train.setup import model_shape

    if plugins := [p for p in offer.get("plugins") or () if p not in recipe.plugins]:
        raise UsageError(
            f"the server's recipe uses the plugins {', '.join(map(str, plugins))}, which are code; if you have and "
            f"trust them, give --set plugins={plugins}"
        )
    offered = build_recipe({"federated": offer["recipe"]["federated"]}).federated
    for key in AGREED:
        own, theirs = getattr(recipe.federated, key), getattr(offered, key)
        if own != theirs:
            raise UsageError(
                f"federated.{key} = {own!r}, and the server's is {theirs!r}; server and clients must have the same: "
                "leave it out"
            )
    theirs, own = ModelShape(**offer["shape"]), model_shape(recipe)
    if not own.vocab:
        own = own.model_copy(update={"vocab": theirs.vocab})
    own = own.model_copy(update={"origin": theirs.origin})
    if differences := model_differences(theirs, own):
        raise UsageError(
            f"this client's model is not the server's, which has {'; and '.join(differences)}; leave [model] and "
            "[adapter] to the server's recipe"
        )
