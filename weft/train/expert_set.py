"""A set of experts in a folder: which trained models they are, and how much each counts before anything is seen.

The folder has a file ``experts.json``, which ``weft experts`` writes::

    {"experts": [{"name": "code", "path": "code"}, {"name": "prose", "path": "prose"}], "prior": [1, 1], "top": 0}

A path is relative to the folder, or any name under which ``weft generate`` finds a model. A set that makes images has
one more key, ``"router": "router.safetensors"``: the file of what tells their clusters apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import UsageError
from weft.train.expert_join import BayesRouter

if TYPE_CHECKING:
    from weft.checkpoint.address import Where
    from weft.data.tokenizer import Tokenizer
    from weft.models.transformer import Transformer

FILE = "experts.json"


@dataclass(frozen=True)
class ExpertSet:
    """Trained experts by name, and the router that weights them.

    Attributes:
        ``folder``: folder of the set, with its file ``experts.json``.
        ``names``: the experts' names.
        ``places``: path or name of each expert's trained model.
        ``router``: computes how much each expert counts in a document or an image.
        ``evidence_file``: file of the network from whose outputs the router weights experts that make images; None for
            experts that write texts.
    """

    folder: Path
    names: tuple[str, ...]
    places: tuple[str, ...]
    router: BayesRouter
    evidence_file: Path | None = None


@dataclass(frozen=True)
class OpenedExperts:
    """The opened models of an :class:`ExpertSet` on one device. A token id means the same token in all of them.

    ``models``: the models, in the order of the set's names. ``files``: contents of the files beside the first model's
    weights, by name. ``tokenizer``: the first model's tokenizer. ``router``: computes the weight of each model.
    """

    models: tuple[Transformer, ...]
    files: dict[str, bytes]
    tokenizer: Tokenizer
    router: BayesRouter


def write_expert_set(
    folder: Path,
    names: Sequence[str],
    prior: Sequence[float],
    top: int = 0,
    router: str = "",
) -> None:
    """Write ``experts.json`` into ``folder``, which makes the folder a set of experts.

    The expert called ``name`` is in the subfolder ``name``. ``names``: names of the experts. ``prior``: weight of each
    expert before anything is seen; the weights need not add up to 1. ``top``: number of the likeliest experts that are
    used; 0: all.

    ``router``: name of the file in ``folder`` with the network that tells clusters of images apart; empty for experts
    that write texts.
    """
    experts = [{"name": name, "path": name} for name in names]
    values: dict[str, Any] = {"experts": experts, "prior": [*prior], "top": top}
    if router:
        values["router"] = router
    (folder / FILE).write_text(json.dumps(values, indent=1) + "\n")


def read_expert_set(where: Where, images: bool = False) -> ExpertSet | None:
    """Read the set of experts in the folder ``where``; return None if the folder has no file ``experts.json``.

    ``images``: whether the caller needs experts that make images, or else experts that write texts. Raises
    :class:`UsageError` if the file cannot be read, or if its experts are of the other sort.
    """
    folder = Path(str(where))
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        tree = json.loads(file.read_text())
        entries = [(str(each["name"]), str(each["path"])) for each in tree["experts"]]
        prior = tuple(float(x) for x in tree.get("prior") or [1.0] * len(entries))
        top = int(tree.get("top", 0))
        router = str(tree.get("router", ""))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{file} is no set of experts ({type(error).__name__}: {error}); write it again with weft experts"
        ) from None
    wrong = _fault([name for name, _ in entries], prior, top)
    if not wrong and bool(router) != images:
        wrong = (
            "these experts write texts, and weft sample makes images; ask them with weft generate --from"
            if images
            else "these experts make images and write no texts; ask them with weft sample --checkpoint"
        )
    if wrong:
        raise UsageError(f"{file}: {wrong}")
    places = tuple(
        str(folder / path) if (folder / path).exists() else path for _, path in entries
    )
    names = tuple(name for name, _ in entries)
    return ExpertSet(
        folder,
        names,
        places,
        BayesRouter(prior, top),
        folder / router if router else None,
    )


def _fault(names: Sequence[str], prior: Sequence[float], top: int) -> str:
    """Return what is wrong with a set of these experts, or an empty string."""
    if not names:
        return "it lists no expert; list at least one"
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"two experts are named {twice!r}; give each a name of its own"
    if len(prior) != len(names):
        return f"'prior' has {len(prior)} weights for {len(names)} experts; give one for each"
    if not all(isfinite(x) and x >= 0 for x in prior) or not any(prior):
        return f"'prior' = {[*prior]}: weights are 0 or more, and one is above 0"
    if not 0 <= top <= len(names):
        return f"'top' = {top} of {len(names)} experts; 0 stands for all"
    return ""


def open_experts(
    where: Where, device: str, warn: Callable[[str], None], ema: bool = False
) -> OpenedExperts | None:
    """Open the experts of the set in the folder ``where``; return None if ``where`` is a single model.

    ``device``, ``warn`` and ``ema`` are arguments of :func:`weft.checkpoint.model.open_model`. Raises
    :class:`UsageError` if a token id does not mean the same token in all experts.
    """
    experts = read_expert_set(where)
    if experts is None:
        return None
    from weft.train.alike_models import open_alike

    opened = open_alike(experts.places, device, warn, ema)
    models: list[Any] = [each.model for each in opened.models]
    return OpenedExperts(
        tuple(models), opened.models[0].files, opened.tokenizer, experts.router
    )


def refuse_beside_experts(where: Where, options: dict[str, Any]) -> None:
    """Raise :class:`UsageError` if the user gave an option that does not apply to a set of experts.

    ``where``: the set, for the message. ``options``: the values of all options that do not apply, by the option's name.
    An empty or false value means that the user did not give the option.
    """
    for option, given in options.items():
        if given:
            raise UsageError(
                f"{where} is a set of experts, which are whole models on one device; leave out {option}"
            )
