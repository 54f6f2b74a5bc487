"""Cache policies: which tokens of a text stay in the cache, and which of them later tokens attend to.

``none`` is the core's own: all of them. The others are techniques, one file each. A policy has one block selector
(:mod:`weft.models.block_selector`) for each layer, and tells the scheduler which blocks no later token will see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from weft.errors import UsageError
from weft.generate.option_word import chosen_technique, wrong_word

if TYPE_CHECKING:
    from weft.generate.block_pool import BlockPool
    from weft.generate.request import Request
    from weft.models.block_selector import BlockSelector
    from weft.models.transformer import Transformer

#: The word for no policy.
NONE = "none"


class TextBlocks(Protocol):
    """Interface of the scheduler, as far as a cache policy may use it. ``pool``: all cache blocks. ``running``: texts
    that have blocks. ``moves``: pairs of block numbers (from, to), which the next step copies before it computes.
    ``moved_blocks``: number of blocks that have moved to the host. ``relief``: functions that are called in turn when
    no block is free; each returns whether it has freed a block.
    """

    pool: BlockPool
    running: list[Request]
    moves: list[tuple[int, int]]
    moved_blocks: int
    relief: list[Callable[[], bool]]


class CachePolicy:
    """Base class of cache policies, which choose the cached tokens that new tokens attend to. ``--cache-policy
    NAME:ARGUMENT`` selects one.

    Attributes:
        ``example``: a value of the option that selects it.
        ``argument``: words on what comes behind the colon, for error lines.
        ``word``: the value by which it has been selected.
        ``remembers``: whether :meth:`selector` returns objects that keep data of each text beside its blocks. Texts
            then share no blocks, and no token can be taken back.
        ``windows``: whether the policy works for layers that have attention windows of their own.
    """

    example: ClassVar[str] = ""
    argument: ClassVar[str] = ""
    word: str = ""
    remembers: ClassVar[bool] = False
    windows: ClassVar[bool] = True

    @classmethod
    def of_argument(cls, argument: str | None) -> Self | None:
        """Build the policy from ``argument``, the text after the first colon; None: there is no colon. Return None if
        the argument is not valid.
        """
        return cls() if argument is None else None

    def check_size(self, size: int) -> None:
        """Raise :class:`UsageError` if the policy's budget is less than a cache block of ``size`` tokens."""

    def selector(self, size: int) -> BlockSelector:
        """Return a new selector, which chooses for one layer the cache blocks that are read in each step. ``size``:
        tokens of a cache block.
        """
        raise NotImplementedError

    def hidden(self, computed: int, size: int) -> range:
        """Return the range of indices, in a text's table of cache blocks, of the blocks to which no later token
        attends. Such blocks can be freed.

        ``computed``: number of the text's computed tokens; ``size``: tokens of a cache block. The first block is never
        hidden.
        """
        return range(0)

    def most_blocks(self, tokens: int, budget: int, size: int) -> int:
        """Return the largest number of cache blocks that a text of ``tokens`` tokens has at any one time.

        ``budget``: largest number of tokens of a step; ``size``: tokens of a cache block.
        """
        return -(-tokens // size)

    def attach(self, scheduler: TextBlocks) -> None:
        """Prepare ``scheduler``, the scheduler of the engine that uses this policy. By default nothing is done."""


def cache_policy_of(word: str) -> CachePolicy | None:
    """Return the policy that ``word`` names, such as ``window:1024``; None for ``none``. Raises :class:`UsageError` for
    a word that names none.
    """
    if word == NONE:
        return None
    policy: CachePolicy | None = chosen_technique("cache-policy", word)
    if policy is None:
        raise wrong_word("--cache-policy", word, "cache-policy", (NONE,))
    policy.word = word
    return policy


def share_of(argument: str | None) -> float | None:
    """Return the fraction that the text ``argument`` states, such as 0.25 for "0.25"; None if there is no text, or if
    it is not a number above 0 and at most 1. Cache policies parse their arguments with it.
    """
    try:
        share = float(argument or "")
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def check_policy(policy: CachePolicy, model: Transformer, size: int) -> None:
    """Raise :class:`UsageError` if ``model`` has layers that ``policy`` cannot serve, or if the policy's budget is less
    than a cache block of ``size`` tokens.
    """
    from weft.models.latent import LatentAttention
    from weft.models.paged import attention_layers

    shape = model.shape
    why = ""
    if shape.kind:
        why = f"a plugin's model ({shape.kind}), which has no cache"
    elif any(shape.mixer_of(i) != "softmax" for i in range(shape.layers)):
        why = "layers of linear attention, which keep a state in the place of keys"
    elif any(isinstance(each, LatentAttention) for each in attention_layers(model)):
        why = "layers of latent attention, whose cache has no keys of single heads"
    elif not policy.windows and any(map(shape.window_of, range(shape.layers))):
        why = "layers with attention windows of their own"
    if why:
        raise UsageError(f"--cache-policy {policy.word} is not for {why}; leave it out")
    policy.check_size(size)


def check_alone(
    word: str, given: Mapping[str, object], remembering: Mapping[str, object]
) -> None:
    """Raise :class:`UsageError` if the cache policy that ``word`` names cannot be combined with an option in use.
    ``given``: values of the options that exclude every policy, by name. ``remembering``: values of the options that
    exclude only policies with :attr:`CachePolicy.remembers`, by name. An option whose value is false is not in use.
    """
    policy = cache_policy_of(word)
    if policy is None:
        return
    refused = {**given, **remembering} if policy.remembers else given
    for option, value in refused.items():
        if value:
            raise UsageError(
                f"--cache-policy {word} cannot be combined with {option}; leave one of them out"
            )
