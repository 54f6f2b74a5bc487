"""What settings are called in other programs: so that a word of theirs is answered with Weft's.

``docs/how-to/coming-from.md`` shows the same table.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Equivalent:
    """A setting of Weft and the names of the same setting in other programs.

    Attributes:
        ``weft``: the setting, as ``section.key``, a section, or an option of a command.
        ``trl``: the names in transformers, PEFT and TRL, which share their arguments.
        ``llama_factory``: the names in LLaMA-Factory.
        ``axolotl``: the names in Axolotl.
        ``torchtitan``: the names in TorchTitan.
        ``megatron``: the names in Megatron-LM and DeepSpeed.
        ``note``: how Weft's setting differs.
    """

    weft: str
    trl: Sequence[str] = ()
    llama_factory: Sequence[str] = ()
    axolotl: Sequence[str] = ()
    torchtitan: Sequence[str] = ()
    megatron: Sequence[str] = ()
    note: str = ""

    @property
    def words(self) -> Iterator[str]:
        """Yield all names that this setting has in other programs."""
        for field in fields(self):
            names = getattr(self, field.name)
            if not isinstance(names, str):
                yield from names


@cache
def equivalents() -> tuple[Equivalent, ...]:
    """Return the settings of the file ``elsewhere.toml`` with their names elsewhere, in the order of the docs page."""
    known = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return tuple(Equivalent(weft, **words) for weft, words in known.items())


def here_called(word: str) -> Equivalent | None:
    """Return the table's entry for ``word``, the name of a setting in another program; None if it has no entry.

    ``word``: the setting's name with or without its section.
    """
    plain = word.strip("-").replace("-", "_")
    last = plain.rpartition(".")[2]
    for wanted in dict.fromkeys((plain, last)):
        for equivalent in equivalents():
            if wanted in equivalent.words:
                return equivalent
    return None


def here_it_is(word: str, as_option: bool = False) -> str:
    """Return a phrase that says what another program's setting ``word`` is called in Weft; empty if it is unknown.

    ``as_option``: whether to name a recipe's key as an option of the command line (``--set section.key=...``).
    """
    equivalent = here_called(word)
    if equivalent is None:
        return ""
    is_key = "." in equivalent.weft
    name = f"--set {equivalent.weft}=..." if as_option and is_key else equivalent.weft
    name = f"[{name}]" if not is_key and not name.startswith("--") else name
    note = (
        f" ({equivalent.note})"
        if equivalent.note and equivalent.note != "a section"
        else ""
    )
    return f"in Weft it is {name}{note}"
