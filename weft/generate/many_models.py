"""``weft serve --models``: a base model and other models of its shape, each under its folder's name."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.checkpoint.model_family import FamilyMember, ModelFamily
from weft.data.tokenizer import Tokenizer, tokenizer_from_files
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.models.transformer import Transformer


def members_of(
    family: ModelFamily, folders: Sequence[Path], tokenizer: Tokenizer, taken: Collection[str],
    warn: Callable[[str], None],
) -> dict[str, FamilyMember]:  # fmt: skip
    """Return descriptions of the models in ``folders`` by their names, without reading their weights yet. ``family``:
    the models of one shape that the engine may have. The engine has already opened one of them, the base.
    ``tokenizer``: the base's tokenizer. ``taken``: names that no further model may have, such as the base's. ``warn``
    prints a line. Raises :class:`UsageError` for a name that is taken, and for models of another shape or tokenizer
    than the base.
    """
    members = {}
    for folder in folders:
        if folder.name in taken:
            raise UsageError(
                f"the model {folder} is named like another model or adapter; rename its folder"
            )
        members[folder.name] = member = family.member(folder, tokenizer)
        if "tokenizer.json" in member.files:
            own = tokenizer_from_files(dict(member.files), str(folder))
            if own.chat_template not in (None, tokenizer.chat_template):
                warn(f"{folder} has a chat template of its own; all models here are asked in the base's")  # fmt: skip
    return members


def add_models(
    engine: Engine, family: ModelFamily, members: Iterable[FamilyMember]
) -> None:
    """Open the models ``members`` of ``family`` and add them to ``engine``, which then keeps them in memory."""
    for member in members:
        engine.add_model(member.name, *open_member(family, member))


def open_member(family: ModelFamily, member: FamilyMember) -> tuple[Transformer, bytes]:
    """Read the weights of ``member``. Return the model, and the hash of its weights.

    ``family``: the models of one shape, ``member`` included, which share memory for equal weights.
    """
    model = family.open(member)
    return model, member.digest


class Room(NamedTuple):
    """Limit of the models that are in memory at the same time. ``models``: largest number of models beside the base.
    ``nbytes``: largest number of bytes of all models, the base included; it takes the place of ``models``. None:
    ``models`` is the limit.
    """

    models: int
    nbytes: int | None

    @classmethod
    def parse(cls, word: str) -> "Room":
        """Return the limit that ``word``, the value of ``--resident``, gives: a number of models, or bytes such as
        800MB or 8GiB.
        """
        parsed = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]i?B)?", word.strip())
        if parsed is None or not float(parsed[1]) or ("." in word and not parsed[2]):
            raise UsageError(
                f"--resident {word!r} is neither a number of models nor bytes; give 4 or 8GB, say"
            )
        if parsed[2] is None:
            return cls(int(parsed[1]), None)
        power = "KMGT".index(parsed[2][0]) + 1
        step = 1024 if parsed[2][1] == "i" else 1000
        return cls(0, int(float(parsed[1]) * step**power))
