"""Drafters guess the next tokens of requests. ``--draft`` names a drafter, or a small model that guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from weft.errors import UsageError
from weft.generate.early_exit import (
    EarlyExit,
    EarlyText,
    check_early_layer,
    raise_for_ranks,
)
from weft.registry import find, names

if TYPE_CHECKING:
    import torch

    from weft.generate.request import Generation, WantedRows
    from weft.models.transformer import Transformer

#: The drafter of every word that is no drafter's name.
SMALL_MODEL = "small-model"


class Drafter:
    """Base class of drafters, which guess next tokens (drafts) of requests, for the model to check.

    ``looks_ahead``: whether the drafter uses the option ``--ahead``. ``early_layer``: number of the model's layers
    after which a pass computes logits for :meth:`look_early`; 0: it does not.
    """

    looks_ahead: ClassVar[bool] = False
    early_layer: int = 0

    @classmethod
    def open(
        cls, word: str, model: Transformer, warn: Callable[[str], None], ahead: int
    ) -> Self:
        """Build the drafter that ``--draft word`` names, for ``model``. ``warn`` shows the user a line. ``ahead``:
        number of likely next tokens from which the drafter guesses on while the model checks its drafts (``--ahead``).

        Raises :class:`UsageError` if the drafter cannot guess for this model.
        """
        return cls()

    def propose(self, requests: Sequence[Generation]) -> None:
        """Guess next tokens for ``requests``, each of which gets one token in the next step. Set the ``drafts`` of each
        request to a list of paths; a path is a list of guessed tokens.

        A drafter may sample the tokens of a path from probabilities, instead of guessing the likeliest ones. Then the
        request must have only this path, and its ``odds`` must be set to these probabilities: ``[vocab]`` for each
        token of the path.
        """
        raise NotImplementedError

    def look_early(self, texts: Sequence[EarlyText], logits: torch.Tensor) -> None:
        """Take the logits ``[rows, vocab]`` of an early layer, while the pass's later layers have not run yet.

        ``texts``: the requests for which the pass samples tokens, each with the indices of its rows.
        """


def early_exit(drafter: Drafter | None, rows: Sequence[WantedRows]) -> EarlyExit | None:
    """Return where a pass shows early logits to ``drafter``; None if the drafter wants none. ``rows``: the rows of
    logits that the pass computes for each request.
    """
    from weft.generate.request import Generation  # PyTorch: not for declarations

    if drafter is None or not drafter.early_layer:
        return None
    texts, first = list[EarlyText](), 0
    for request, _, prompt, drawn in rows:
        if drawn and isinstance(request, Generation) and not request.context:
            path = request.branches[0].path if request.branches else ()
            texts.append(EarlyText(request, path, first + prompt))
        first += prompt + drawn
    take = partial(drafter.look_early, texts)
    return EarlyExit(drafter.early_layer, take) if texts else None


def _class_of(word: str) -> Any:
    return find(
        "drafter", word if word in names("drafter") else SMALL_MODEL
    ).implementation


def check_ahead(word: str, ahead: int, early_layer: int = 0, ranks: int = 1) -> None:
    """Raise :class:`UsageError` if the options ``--ahead`` and ``--early-layer`` do not fit. ``--ahead`` needs a small
    model as the drafter ``word``. ``--early-layer`` needs ``--ahead``, and a model on one rank.

    ``ahead``, ``early_layer``: values of the options, 0 if they are not given. ``ranks``: ranks of the model.
    """
    if ahead and not (word and _class_of(word).looks_ahead):
        draft = f"--draft {word} looks guesses up" if word else "there is no --draft"
        raise UsageError(
            f"--ahead {ahead} is for a small model that guesses, and {draft}; give --draft MODEL"
        )
    if early_layer and not ahead:
        raise UsageError(
            f"--early-layer {early_layer} says where --ahead takes its tokens from; give --ahead too, for instance 2"
        )
    if early_layer and ranks > 1:
        raise_for_ranks(early_layer)


def drafter_for(
    word: str,
    model: Transformer,
    warn: Callable[[str], None],
    ahead: int = 0,
    early_layer: int = 0,
) -> Drafter | None:
    """Build the drafter that the option ``word`` names, for ``model``; return None if ``word`` is "".

    ``word``: name of a registered drafter; any other word is taken as the name of a small model with the same
    vocabulary, which then guesses.

    While ``model`` checks the small model's drafts, the small model can already guess on behind likely outcomes of this
    check. ``ahead``: number of likely next tokens behind which it does so; 0: it does not. ``early_layer``: number of
    first layers of ``model`` from whose output these likely tokens are taken; 0: they are the small model's own. Raises
    :class:`UsageError` if the options do not fit each other or the model.
    """
    check_ahead(word, ahead, early_layer)
    if not word:
        return None
    if early_layer:
        check_early_layer(model, early_layer)
    drafter: Drafter = _class_of(word).open(word, model, warn, ahead)
    drafter.early_layer = early_layer
    return drafter
