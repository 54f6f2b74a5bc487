"""Drafters guess the next tokens of requests; ``--draft`` names one by a word, or a small model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from weft.errors import UsageError
from weft.registry import find, names

if TYPE_CHECKING:
    from weft.generate.request import Generation
    from weft.models.transformer import Transformer

#: The drafter of every word that is no drafter's name.
SMALL_MODEL = "small-model"


class Drafter:
    """Base class of drafters, which propose draft tokens for requests. ``looks_ahead``: the drafter uses the option
    ``--ahead``.
    """

    looks_ahead: ClassVar[bool] = False

    @classmethod
    def open(
        cls, word: str, model: Transformer, warn: Callable[[str], None], ahead: int
    ) -> Self:
        """Build the drafter that ``--draft word`` names, for ``model``; ``warn`` shows the user a line.

        Raises :class:`UsageError` if the drafter cannot guess for this model.
        """
        return cls()

    def propose(self, requests: Sequence[Generation]) -> None:
        """Set ``drafts``, a list of token paths, of each request in ``requests``. The next step computes one token of
        each.

        A path that was sampled must be the only one of its request; ``odds`` must then be set as well.
        """
        raise NotImplementedError


def _class_of(word: str) -> Any:
    return find(
        "drafter", word if word in names("drafter") else SMALL_MODEL
    ).implementation


def check_ahead(word: str, ahead: int) -> None:
    """Raise :class:`UsageError` if ``--ahead`` is given and the drafter ``word`` is no small model."""
    if ahead and not (word and _class_of(word).looks_ahead):
        draft = f"--draft {word} looks guesses up" if word else "there is no --draft"
        raise UsageError(
            f"--ahead {ahead} is for a small model that guesses, and {draft}; give --draft MODEL"
        )


def drafter_for(
    word: str, model: Transformer, warn: Callable[[str], None], ahead: int = 0
) -> Drafter | None:
    """Build the drafter that ``word`` names; return None for "".

    A word that is no drafter's name names a small model. The small model needs the vocabulary of ``model`` and uses
    ``ahead``. Raises :class:`UsageError`.
    """
    check_ahead(word, ahead)
    if not word:
        return None
    drafter: Drafter = _class_of(word).open(word, model, warn, ahead)
    return drafter
