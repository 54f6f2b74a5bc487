"""Random numbers without a state: each is a hash of a request's seed and of the place of the token that it selects.

A text can therefore go on from its tokens alone, in another engine or after a restart, as if nothing had happened.
"""

from hashlib import blake2b

#: The largest number below 1 is one unit below 2^53 of these units.
UNIT = 2.0**-53


def uniform_number(seed: int, position: int, draw: int = 0) -> float:
    """Return a random number in [0, 1) for the token number ``position`` of a text that is sampled with ``seed``. A
    token may need several numbers; ``draw`` says which one, from 0. Equal arguments always give the same number, on
    every machine.
    """
    said = f"{seed} {position} {draw}".encode()
    return (
        int.from_bytes(blake2b(said, digest_size=8).digest(), "little") >> 11
    ) * UNIT


class TokenNumbers:
    """The random numbers of the token at ``position`` of a text that is sampled with ``seed``: the numbers of
    :func:`uniform_number` for ``draw`` 0, 1, and so on.
    """

    def __init__(self, seed: int, position: int) -> None:
        self.seed, self.position, self.draw = seed, position, 0

    def random(self) -> float:
        """Return the token's next random number, in [0, 1)."""
        number = uniform_number(self.seed, self.position, self.draw)
        self.draw += 1
        return number
