"""Sums of clients' tensors that show the server the sum alone, by masks that cancel (Bonawitz et al. 2017).

Every two clients of a cohort (the clients whose updates are summed together) derive a common seed from a Diffie-Hellman
exchange. The seed gives a mask of random numbers. Of the pair, the client whose name comes first adds the mask to its
tensor and the other client subtracts the mask. Tensors are rounded to multiples of 2^-40 and summed modulo 2^64, so
that masks cancel exactly, and the result is the sum of the rounded tensors.

If a client of the cohort is lost, the remaining clients tell the server their seeds with that client for this cohort,
and the server takes the masks out. This protects updates from a server that follows the protocol and looks at all that
arrives. It does not protect a client from a server that lies about who was lost, for which the protocol of the paper
needs a second mask and shared secrets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from weft.errors import WeftError
from weft.net.wire import require_cipher

T = torch.Tensor

#: Binary digits after the point of a rounded element, and of the whole integer.
FRACTION, WORD = 40, 64


@dataclass(frozen=True)
class MaskKey:
    """A client's key for the exchange of seeds with other clients.

    Attributes:
        ``public``: the public key in hexadecimal, which others learn.
        ``private``: the private key, an object of the package ``cryptography``.
    """

    public: str
    private: Any = field(repr=False)

    def seed(self, other: str, cohort: str) -> bytes:
        """Return the secret seed for one cohort that this client has in common with another client.

        ``other``: the other client's public key. ``cohort``: name of the cohort, new for every sum, so that a seed
        tells nothing about other sums. Raises :class:`WeftError` if ``other`` is not a public key.
        """
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            public = require_cipher().public_key.from_public_bytes(bytes.fromhex(other))
            shared = self.private.exchange(public)
        except ValueError:
            raise WeftError(
                "a client's public key for secure sums is damaged"
            ) from None
        about = b"weft secure sum " + cohort.encode()
        return HKDF(hashes.SHA256(), 32, salt=None, info=about).derive(shared)


def new_mask_key() -> MaskKey:
    """Return a new key pair with which a client takes part in secure sums.

    Raises :class:`weft.net.wire.CipherMissing` if the package ``cryptography`` is not installed.
    """
    private = require_cipher().private_key.generate()
    return MaskKey(private.public_key().public_bytes_raw().hex(), private)


def mask_of(seed: bytes, count: int) -> T:
    """Return ``count`` random integers from ``seed``, int64 ``[count]``: the key stream of ChaCha20."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    text = bytearray(stream.update(bytes(8 * count)))
    return torch.from_numpy(np.frombuffer(text, dtype=np.int64))


def rounded_integers(values: T, clients: int) -> T:
    """Round ``values`` to multiples of 2^-40, and return the multiples as a flat int64 tensor.

    ``clients``: number of tensors in the sum. Raises :class:`WeftError` if an element is not finite, or so large that
    the sum of so many tensors could wrap around.
    """
    wide = values.detach().flatten().to("cpu", torch.float64)
    most = 2.0 ** (WORD - 1 - FRACTION) / clients
    largest = float(wide.abs().max()) if wide.numel() else 0.0
    if not largest < most:  # also if it is not a number
        raise WeftError(
            f"an update has an element of {largest:g}, and secure sums over {clients} clients hold less than {most:g}"
        )
    return (wide * 2.0**FRACTION).round().to(torch.int64)


def masked(values: T, name: str, seeds: Mapping[str, bytes]) -> T:
    """Return the integers that a client sends: its values, rounded, plus masks that cancel in the sum of all clients.

    The result is int64 ``[values.numel()]``. ``values``: the client's tensor. ``name``: the client's name. ``seeds``:
    its seeds with each other client of the cohort, by that client's name.
    """
    sent = rounded_integers(values, len(seeds) + 1)
    for other, seed in seeds.items():
        mask = mask_of(seed, sent.numel())
        if name < other:
            sent += mask
        else:
            sent -= mask
    return sent


@dataclass(frozen=True)
class ToldSeed:
    """Seed of a pair of clients that the remaining client reveals to the server, because the other was lost.

    ``client``: the remaining client. ``lost``: the lost client. ``seed``: the seed of the pair.
    """

    client: str
    lost: str
    seed: bytes = field(repr=False)


def unmasked_sum(arrived: Mapping[str, T], revealed: Iterable[ToldSeed] = ()) -> T:
    """Return the sum of the tensors of all clients in ``arrived``, float64 and flat.

    ``arrived``: the masked integers of each client that has answered, by name. ``revealed``: the seed of each pair of
    such a client and a lost client of the cohort. If a seed is missing, the result is noise.
    """
    total = sum(arrived.values(), torch.zeros((), dtype=torch.int64))
    for pair in revealed:
        if pair.client not in arrived:
            continue
        mask = mask_of(pair.seed, total.numel())
        total = total - mask if pair.client < pair.lost else total + mask
    return total.to(torch.float64) / 2.0**FRACTION
