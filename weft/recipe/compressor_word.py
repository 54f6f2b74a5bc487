"""Parses the name of a compressor in a recipe, such as ``topk:0.01``; without PyTorch."""

from typing import NamedTuple

from weft.errors import UsageError, nearest

#: Every compressor with an example of what may stand behind its colon; without one, nothing may.
COMPRESSORS = {
    "none": "", "int8": "random", "int7": "random", "int6": "random", "int5": "random", "int4": "random",
    "topk": "0.01", "randk": "0.1", "powersgd": "4", "sign": "", "cocktail": "",
}  # fmt: skip

#: Compressors without a rank, a share or a number of bits that could differ from tensor to tensor.
UNSETTABLE = ("none", "sign", "cocktail")

#: Elements of a tensor that share a scale, which is a bfloat16.
BLOCK = 128


class CompressorWord(NamedTuple):
    """A compressor's name and setting.

    ``share``: of the elements that are kept; ``rank``: of the two factors of a matrix; ``random``: round at random.
    """

    name: str
    share: float = 0.0
    rank: int = 0
    random: bool = False


def compressor_word(word: str) -> CompressorWord:
    """``word`` taken apart; whatever is wrong with it is a :class:`UsageError` of one line."""
    name, colon, argument = word.strip().partition(":")
    if name not in COMPRESSORS:
        raise UsageError(
            f"there is no compressor {name!r}; {nearest(name, COMPRESSORS)}"
        )
    example = COMPRESSORS[name]
    if not example and colon:
        raise UsageError(
            f"compressor {word!r} takes nothing after its name; write {name!r}"
        )
    if name.startswith("int"):
        if colon and argument != "random":
            raise UsageError(
                f"compressor {word!r} rounds to the nearest, or at random; write {name!r} or '{name}:random'"
            )
        return CompressorWord(name, random=bool(colon))
    if name in ("topk", "randk"):
        share = _number(argument)
        if not 0 < share <= 1:
            raise UsageError(f"compressor {word!r} needs the share of elements to keep, above 0 and at most 1, as in "
                             f"'{name}:{example}'")  # fmt: skip
        return CompressorWord(name, share=share)
    if name == "powersgd":
        rank = _number(argument)
        if not (rank >= 1 and rank == int(rank)):
            raise UsageError(
                f"compressor {word!r} needs a rank of at least 1, as in 'powersgd:{example}'"
            )
        return CompressorWord(name, rank=int(rank))
    return CompressorWord(name)


def _number(text: str) -> float:
    """The finite number that ``text`` is, or 0."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if abs(number) < float("inf") else 0.0
