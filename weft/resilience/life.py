"""One rank's life in a run that may lose ranks: decides what the rank does next, and runs the loop that does it.

A rank stays in a *view* until the view ends, agrees with the others on the next view, and stays in that one. A rank
without islands trains within a stay. A rank of an island trains beside its stays, in another thread. :class:`Life`
decides, without sockets, threads or clocks; :func:`live` carries the decisions out.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from weft.errors import WeftError
from weft.resilience.views import Address, Fatal, LeftOut, TooFew, View
from weft.run.failure import cause_of, is_secondary
from weft.train.guard import Regroup

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

#: How often a step is tried before the run ends, as what fails so often is not the loss of ranks.
ATTEMPTS = 8
#: The error of a rank that was left out and cannot reach the others to ask them to let it in again.
ALONE = "the others have gone on without this rank, and cannot be reached any more"
#: What members are told (:meth:`Membership.fatal`) when a run has come to its regular end.
ENDED = "the run has ended"


class LifeMove(Enum):
    """Next action of a rank in a run whose set of members (view) may change.

    ``JOIN``: ask members of the run to be let in. ``AGREE``: agree with the others on the next view. ``STAY``: take
    part in the present view. ``END``: end this rank's part in the run.
    """

    JOIN = "ask members of the run to be let in"
    AGREE = "agree with the others on the next view"
    STAY = "take part in the present view"
    END = "end"


class ViewEntry(NamedTuple):
    """Result of entering a view (set of the run's members): whether this member can take part in it.

    ``unable``: why this member cannot take part; "" if it can. ``again``: whether another member cannot take part, so
    that the others must agree on one more view.
    """

    unable: str = ""
    again: bool = False


@dataclass
class Life:
    """State machine that decides what a rank does next: join the run, agree on the next view, take part in it, or end.

    Attributes:
        ``move``: next action of the rank.
        ``of_island``: whether the rank belongs to an island that is started again after a loss. Such a rank ends if it
            is left out or fails. Other ranks ask to be let in again, and their own errors end the run for all.
        ``error``: why the rank ends; None if it ends well.
        ``farewell``: reason that makes all other ranks end, too; "" if they go on.
        ``left_out``: whether the others have gone on without this rank.
        ``attempts``: number of times that the step after ``step`` has failed.
        ``step``: number of the last step that was done.
    """

    move: LifeMove
    of_island: bool = False
    error: Exception | None = None
    farewell: str = ""
    left_out: bool = False
    attempts: int = 0
    step: int = 0

    def advance(self, step: int) -> None:
        """Record that training step number ``step`` is done. Failures before it no longer count."""
        if step > self.step:
            self.attempts, self.step = 0, step

    def regroup(self) -> None:
        """Record that this rank agrees with the others on the next view (set of members) now.

        Call it when the present view has ended on purpose, or when a member has answered this rank's request to join.
        """
        self.move = LifeMove.AGREE

    def enter(self, view: View, entry: ViewEntry) -> None:
        """Record that this rank has entered ``view``. ``entry``: whether this rank can take part in it.

        If members of the previous view are lost, the count of failures begins anew, because the run may then go back
        many steps.
        """
        if view.lost:
            self.attempts = self.step = 0
        self.left_out = False
        self.move = LifeMove.AGREE if entry.again else LifeMove.STAY
        if entry.unable:
            self.end(LeftOut(entry.unable))

    def refuse(self, error: Fatal | LeftOut | TooFew) -> None:
        """Record that no next view includes this rank, because of ``error``, and set :attr:`move` to the action that
        follows.
        """
        if isinstance(error, LeftOut) and not self.of_island:
            self.left_out = True
            if error.asked:
                self.end()
            else:
                self.move = LifeMove.JOIN
        elif isinstance(error, TooFew) and self.left_out:
            self.end(LeftOut(ALONE))
        else:
            self.left_out = isinstance(error, LeftOut)
            self.end(None if str(error) == ENDED else error)

    def fail(self, error: Exception, broken: bool, step: int) -> str:
        """Record that training in the present view (set of members) has failed with ``error``.

        Returns the text to report to the other ranks, or "" if there is nothing to report. ``broken``: whether the
        members know already that the view has lost a member. ``step``: number of the last step that was done.

        This rank ends if the error has its cause in this rank, or if the same step has failed too often. Otherwise it
        agrees with the others on the next view.
        """
        cause = cause_of(error)
        own = isinstance(error, WeftError) or isinstance(cause, SystemExit)
        if own or not (broken or is_secondary(cause)):
            self.end(error, f"{type(error).__name__}: {error}")
            return ""
        self.attempts += 1
        if self.attempts > ATTEMPTS:
            self.end(error, f"step {step + 1} has failed {ATTEMPTS} times: {error}")
            return ""
        self.move = LifeMove.AGREE
        return "" if broken else str(cause)

    def end(self, error: Exception | None = None, farewell: str = "") -> None:
        """Record that this rank's part in the run is over.

        ``error``: why the rank ends; None if it ends well. ``farewell``: the reason that makes all other ranks end,
        too; "" if they go on. A rank of an island gives no such reason.
        """
        self.move, self.error = LifeMove.END, error
        self.farewell = "" if self.of_island else farewell


class Agent(Protocol):
    """Interface of the agent that agrees on views for a rank. Its implementation is :class:`.membership.Membership`."""

    @property
    def why(self) -> str: ...
    def join(self, contacts: Sequence[Address], limit: float) -> None: ...
    def next(
        self, facts: dict[str, Any], limit: float, patience: float | None = None
    ) -> View: ...
    def report(self, text: str) -> None: ...
    def leave(self) -> None: ...
    def fatal(self, text: str) -> None: ...


class Party(Protocol[R_co]):
    """Interface of a rank's part in a run whose members change: what the rank does in each view (set of members).

    :func:`live` calls the methods. There are two implementations: for runs without islands, where a rank trains while a
    view lasts (:class:`.rank_life.RankParty`), and for the ranks of islands, where a thread follows the views beside
    the training (:class:`.island_party.IslandParty`).
    """

    @property
    def step(self) -> int:
        """Number of the last completed training step."""

    def start_over(self) -> Sequence[Address]:
        """Forget all state of this rank's membership, because the rank must ask to be let into the run again.

        Returns the addresses of members that may let this process in.
        """

    def facts(self) -> dict[str, Any]:
        """Return the JSON values that this rank tells all members of the next view (set of members)."""

    def patience(self) -> float:
        """Return the seconds after which a member that is alive but has not asked for the next view is left out."""

    def enter(self, view: View) -> ViewEntry:
        """Make ``view`` (a set of members) the present one.

        The result says whether this rank can take part in the view. It also says whether another member cannot, so that
        all members must agree on one more view.
        """

    def stay(self) -> R_co:
        """Take part in the present view until the run ends. Returns the result of the run.

        Raises :class:`Regroup` if the view ends before the run.
        """

    def part(self, broken: bool) -> None:
        """Leave the present view. ``broken``: whether the view has failed, instead of ending on purpose."""


def live(life: Life, agent: Agent, party: Party[R], limit: float) -> R | None:
    """Let this rank take part in one view (set of members) after another, until its part in the run is over.

    Returns the result of the run, which is the result of the last call of :meth:`Party.stay`. Returns None if this rank
    was asked to leave, or if the run has ended without it. Raises the error that ends this rank.

    ``life``: decides what the rank does next; ``agent``: agrees on views with the other ranks; ``party``: does the
    rank's part in a view; ``limit``: seconds that an agreement may take.
    """
    ending: R | None = None
    while life.move is not LifeMove.END:
        if life.move is LifeMove.STAY:
            ending = _stay(life, agent, party)
            continue
        try:
            if life.move is LifeMove.JOIN:
                agent.join(party.start_over(), limit)
                life.regroup()
                continue
            view = agent.next(party.facts(), limit, party.patience())
        except (Fatal, LeftOut, TooFew) as error:
            life.refuse(error)
        else:
            entry = party.enter(view)
            if entry.unable:
                agent.leave()
            life.enter(view, entry)
    if life.error is not None:
        raise life.error
    return ending


def _stay(life: Life, agent: Agent, party: Party[R]) -> R | None:
    """Take part in the present view; return None if the view ends before the run."""
    ending: R | None = None
    try:
        ending = party.stay()
        life.end()
    except Regroup:
        life.regroup()
    except Exception as error:
        report = life.fail(error, bool(agent.why), party.step)
        if life.farewell:
            agent.fatal(life.farewell)
        elif report:
            agent.report(report)
        if life.move is not LifeMove.END:
            # their frames hold the model and its gradients
            for failure in (error, error.__cause__, error.__context__):
                if failure is not None:
                    traceback.clear_frames(failure.__traceback__)
                    failure.__traceback__ = None
    finally:
        party.part(broken=ending is None)
    return ending
