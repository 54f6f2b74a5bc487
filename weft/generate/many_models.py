"""``weft serve --models``: a base model and other models of its shape, each under its folder's name."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from weft.checkpoint.model_family import FamilyMember, ModelFamily
from weft.data.tokenizer import Tokenizer, tokenizer_from_files
from weft.errors import UsageError
from weft.generate.engine import Engine


def members_of(
    family: ModelFamily, folders: Sequence[Path], tokenizer: Tokenizer, taken: Collection[str],
    warn: Callable[[str], None],
) -> dict[str, FamilyMember]:  # fmt: skip
    """Return the models in ``folders`` by their names. ``tokenizer``: that of the base; ``taken``: names in use.

    Raises :class:`UsageError` for a name that is taken, and for models of another shape or tokenizer than the base.
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
    engine: Engine, family: ModelFamily, folders: Sequence[Path], tokenizer: Tokenizer, name: str,
    warn: Callable[[str], None],
) -> list[str]:  # fmt: skip
    """Open the models in ``folders`` and add them to ``engine``; return their names. ``name``: that of the base.

    Raises :class:`UsageError` as :func:`members_of` does.
    """
    taken = {name, *engine.scheduler.adapter_keys}
    members = members_of(family, folders, tokenizer, taken, warn)
    for member in members.values():
        engine.add_model(member.name, family.open(member))
    return [*members]
