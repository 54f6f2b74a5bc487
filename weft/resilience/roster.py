"""The roster of a run: a file in its folder with the members' addresses, to look at, join, or shrink a run."""

import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.errors import UsageError
from weft.resilience.views import Member, View

FILE = "ranks/members.json"
#: Lists the numbers of members that are to leave, one a line. The first rank reads and removes it.
REMOVE = "ranks/remove"


@dataclass(frozen=True)
class Roster:
    """Members of a run at present, as a file in the run's folder lists them for newcomers.

    ``epoch``: number of the view (set of members); ``members``: its members, by rank; ``token``: the run's secret;
    ``about``: JSON values about the run for newcomers, such as the recipe.
    """

    epoch: int
    members: tuple[Member, ...]
    token: str
    about: dict[str, Any]


def write_roster(folder: Path, view: View, token: str) -> None:
    """Write the members of ``view`` and the run's secret ``token`` to a file in the run's folder ``folder``.

    Only the owner may read the file, as whoever has the secret can take part in the run.
    """
    members = [
        asdict(member) | {"rank": rank} for rank, member in enumerate(view.members)
    ]
    path = folder / FILE
    draft = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # a full disk must not end the run
        path.parent.mkdir(exist_ok=True)
        draft.touch(stat.S_IRUSR | stat.S_IWUSR)
        draft.write_text(
            json.dumps(
                {
                    "epoch": view.epoch,
                    "token": token,
                    "about": view.about,
                    "members": members,
                }
            )
        )
        draft.replace(path)


def read_roster(folder: Path) -> Roster:
    """Return the members of the run in ``folder``, as last written by :func:`write_roster`.

    Raises :class:`UsageError` if the folder has no such file, or the file cannot be read.
    """
    try:
        words = json.loads((folder / FILE).read_text())
        names = Member.__dataclass_fields__
        members = tuple(
            Member(**{name: member[name] for name in names})
            for member in words["members"]
        )
        return Roster(words["epoch"], members, words["token"], words["about"])
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no {FILE}; give the folder of a run of several ranks that goes on, with resilience.survive"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder / FILE} cannot be read ({error}); is it a run of another version?"
        ) from None


def ask_to_leave(folder: Path, numbers: list[int]) -> None:
    """Ask members to leave the run, by a file in the run's folder ``folder``. ``numbers``: the members' numbers."""
    with (folder / REMOVE).open("a") as file:
        file.write("".join(f"{number}\n" for number in numbers))


def asked_to_leave(folder: Path) -> list[int]:
    """Return the numbers of members that :func:`ask_to_leave` has written since the last call, and remove the file.

    ``folder``: the run's folder.
    """
    path = folder / REMOVE
    if not path.exists():
        return []
    taken = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.rename(taken)
        text = taken.read_text()
        taken.unlink()
        return [int(word) for word in text.split() if word.isdecimal()]
    return []
