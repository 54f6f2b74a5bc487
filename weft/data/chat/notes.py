"""Notes about the conversations of a source: words that the template leaves out, and turns without an end."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weft.data.chat.followed import Followed

#: What a template leaves out, by role and part (or part alone), as a sentence says it.
_LEFT_OUT = {
    ("system", "content"): "writes no system turn",
    ("developer", "content"): "writes no developer turn",
    "content": "leaves out words of the {role}",
    "reasoning": "leaves out reasoning of the {role}'s turns",
    "arguments": "leaves out calls of tools",
    "name": "leaves out calls of tools",
}
_NO_TOOLS = "does not show the model its tools"
_NO_END = "writes no stop id behind the last learned turn, whose end is not learned"

#: What to do about it, where there is something else than another template.
_REMEDIES = {
    "leaves out reasoning": "; data.chat.reasoning = 'split' or 'keep' learns it if the last question's turns have it",
    _NO_END: "; a data.chat.template that ends conversations with one teaches it",
}


class Facts(NamedTuple):
    """Facts about one conversation that are reported to the user.

    ``left_out``: descriptions of parts of messages that the template leaves out. ``stops``: whether a stop id (the id
    of a token at which generation ends) is learned.
    """

    left_out: frozenset[str]
    stops: bool


def facts_of(
    followed: Followed,
    learned: np.ndarray,
    ending: np.ndarray,
    numbers: Collection[int],
) -> Facts:
    """Return the facts about a rendered conversation that are reported to the user.

    ``followed``: the rendered text. ``learned``: int64, the ids of its learned tokens; ``ending``: those of its last
    learned turn. ``numbers``: the numbers of its learned messages. Reasoning that the template leaves out is reported
    only for learned messages.
    """
    kinds = set()
    for number, part in followed.left_out():
        role = followed.talk.messages[number]["role"]
        if part != "reasoning" or number in numbers:
            kinds.add(_LEFT_OUT.get((role, part), _LEFT_OUT[part]).format(role=role))
    names = [
        tool.get("function", tool).get("name") for tool in followed.talk.tools or ()
    ]
    if any(isinstance(name, str) and name not in followed.shown.text for name in names):
        kinds.add(_NO_TOOLS)
    kinds |= {
        f"does not read {name!r} of 'chat_template_kwargs'"
        for name in followed.talk.variables
        if name not in followed.template.source
    }
    stops = followed.template.tokenizer.stops
    if len(ending) and not np.isin(ending, stops).any():
        kinds.add(_NO_END)
    return Facts(frozenset(kinds), bool(np.isin(learned, stops).any()))


@dataclass
class Notes:
    """Collects facts about the conversations of one source, to report them to the user.

    ``stops``: names of the tokens at which generation ends. ``counts``: number of records in which the template leaves
    out a part of a message, by a description of the part. ``learned``: whether any conversation learns a stop id (the
    id of a token at which generation ends).
    """

    stops: tuple[str, ...]
    counts: Counter[str] = field(default_factory=Counter)
    learned: bool = False
    _place: object = None
    _seen: set[str] = field(default_factory=set)

    def add(self, place: object, facts: Facts) -> None:
        """Count the facts about one conversation, whose record is at ``place`` (file and line).

        Successive conversations at the same place come from one record, which counts once.
        """
        if place != self._place:
            self._place, self._seen = place, set()
        self.counts.update(facts.left_out - self._seen)
        self._seen |= facts.left_out
        self.learned = self.learned or facts.stops

    def sentences(self) -> list[str]:
        """Return the collected facts as lines for the user: parts that the template left out, and a warning if no stop
        id is learned.
        """
        said = [
            f"the chat template {kind} ({_records(count)}){_remedy(kind)}"
            for kind, count in sorted(self.counts.items())
            if self.learned or kind != _NO_END
        ]
        if not self.learned:
            names = _listed(self.stops)
            said.append(
                f"no learned turn ends with a stop id ({names}), so the model does not learn to end a turn; name the "
                "token that ends them as 'eos_token_id' in generation_config.json, or set data.chat.template"
            )
        return said


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count:,} records"


def _remedy(kind: str) -> str:
    return next(
        (remedy for start, remedy in _REMEDIES.items() if kind.startswith(start)), ""
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "it has no name"
