"""One member of a test's crew: a small process without PyTorch that takes orders on its standard input.

Orders and answers are lines of JSON. Once told who its members are it "trains": it waits until its view is broken or
somebody has a wish, agrees on the next view, and says what came of it.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from weft.resilience.membership import Membership
from weft.resilience.views import LeftOut, Member, TooFew


class Doomed(Membership):
    """Ends its process as it sends its n-th message of a kind: ``dies = ["commit", 1]``."""

    dies: list[Any] | None = None

    def _count(self, what: str) -> None:
        if self.dies and what == self.dies[0]:
            self.dies[1] -= 1
            if self.dies[1] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def _send(self, wire: Any, message: dict[str, Any]) -> None:
        self._count(message["t"])
        super()._send(wire, message)

    def _dial(self, link: Any, now: float) -> None:
        self._count("dial")
        super()._dial(link, now)


class CutOff(Doomed):
    """Behind a link that can be down: then no message comes or goes, and no connection is made or lost."""

    unreachable: frozenset[int] = frozenset()  # ports

    def _send(self, wire: Any, message: dict[str, Any]) -> None:
        if wire.address[1] not in self.unreachable:
            super()._send(wire, message)

    def _dial(self, link: Any, now: float) -> None:
        if link.member.port not in self.unreachable:
            super()._dial(link, now)

    def _hear(self, wire: Any, message: dict[str, Any], now: float) -> None:
        if wire.address[1] not in self.unreachable:
            super()._hear(wire, message, now)


def say(**what: Any) -> None:
    print(json.dumps(what | {"when": time.time()}), flush=True)


stuck = threading.Event()


def train(
    membership: Membership, limit: float, rejoins: bool, patience: float | None
) -> None:
    while True:
        if stuck.is_set():
            return
        if not membership.why and not membership.wants_change() and membership.view:
            time.sleep(0.002)
            continue
        why, view = membership.why, membership.view
        try:
            view = membership.next({"pid": os.getpid()}, limit, patience)
        except LeftOut as error:
            say(left_out=str(error), asked=error.asked)
            if not rejoins or error.asked or view is None:
                break
            try:
                membership.join([member.address for member in view.members], limit)
            except TooFew as nobody:
                say(error="TooFew", text=str(nobody))
                break
            continue
        except Exception as error:
            say(error=type(error).__name__, text=str(error))
            break
        say(
            view=[member.number for member in view.members], epoch=view.epoch, me=membership.me.number, why=why,
            lost=[[one.member.number, one.rank, one.why] for one in view.lost],
            pids=[facts["pid"] for facts in view.facts], about=view.about,
        )  # fmt: skip
    membership.close()


def end(membership: Membership, limit: float) -> None:
    membership.end(limit)
    say(ended=[number for number, facts in membership.published.items() if facts])


def main() -> None:
    options = json.loads(sys.argv[1])
    broken: list[str] = []
    membership = CutOff(
        options["detect"], options["token"], broken.append, number=options["number"]
    )
    membership.dies = options.get("dies")
    say(member=vars(membership.me))
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "begin":
                membership.begin(
                    [Member(**member) for member in order["members"]], {"recipe": "r"}
                )
            case "join":
                try:
                    membership.join(order["contacts"], options["limit"])
                except TooFew as error:
                    say(error="TooFew", text=str(error))
                    return
            case "cut":
                membership.unreachable = frozenset(order["ports"])
                continue
            case "leave":
                membership.leave()
                continue
            case "remove":
                membership.remove(order["number"])
                continue
            case "fatal":
                membership.fatal(order["text"])
                continue
            case "end":
                ends = threading.Thread(
                    target=end, args=(membership, options["limit"]), daemon=True
                )
                ends.start()
                continue
            case "stuck":
                stuck.set()
                continue
            case "report":
                membership.report(order["text"])
                continue
            case "published":
                membership.publish(step=order["step"])
                time.sleep(options["detect"])
                say(published=membership.published)
                continue
        given = (
            membership,
            options["limit"],
            options["rejoins"],
            options.get("patience"),
        )
        threading.Thread(target=train, args=given, daemon=True).start()


main()
