"""Refuses what cannot be combined: a rule is a condition, the reason for the refusal, and a remedy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from weft.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    #: What a rule reads; a rule that stands alone may read anything.
    A = TypeVar("A", contravariant=True, default=Any)
else:
    from typing import TypeVar

    A = TypeVar("A")


class Conflict(UsageError, ValueError):
    """A refusal by the rule with the name ``rule``; a :class:`ValueError` too, as validators must raise."""

    def __init__(self, message: str, rule: str) -> None:
        super().__init__(message, rule)
        self.message, self.rule = message, rule

    def __str__(self) -> str:
        return self.message


class Asked:
    """Settings that rules read, as attributes; settings that are not known yet have no attribute.

    Subclasses declare the settings, and add properties that conditions and texts of rules need.
    """

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)


@dataclass(frozen=True)
class Rule(Generic[A]):
    """A rule that refuses a request with ``why`` and ``remedy`` if ``meets`` is true.

    ``needs``: the attributes that ``meets`` reads. In the texts ``{0}`` stands for the argument of ``meets``.
    """

    name: str
    needs: str
    meets: Callable[[A], bool]
    why: str
    remedy: str


def refuse(asked: A, rules: Iterable[Rule[A]]) -> None:
    """Raise :class:`Conflict` for the first rule whose condition holds; rules about unknown settings are skipped."""
    for rule in rules:
        if set(rule.needs.split()) <= vars(asked).keys() and rule.meets(asked):
            raise Conflict(f"{rule.why}; {rule.remedy}".format(asked), rule.name)
