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
    """Error for a request whose settings cannot be combined. ``rule``: name of the rule that refuses it.

    It is also a :class:`ValueError`, as pydantic's validators must raise one.
    """

    def __init__(self, message: str, rule: str) -> None:
        super().__init__(message, rule)
        self.message, self.rule = message, rule

    def __str__(self) -> str:
        return self.message


class Asked:
    """Base of classes that hold the settings of a request as attributes, for rules to read.

    A setting that is not known yet has no attribute. Subclasses declare the settings, and add properties that
    conditions and texts of rules need.
    """

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)


@dataclass(frozen=True)
class Rule(Generic[A]):
    """A rule that refuses requests whose settings cannot be combined.

    Attributes:
        ``name``: the rule's name.
        ``needs``: attributes of the settings that the condition reads, separated by spaces.
        ``meets``: the condition; it gets the settings, and returns whether the request is refused.
        ``why``: beginning of the error line, in which ``{0}`` stands for the settings.
        ``remedy``: rest of the error line, which says what the user can do.
    """

    name: str
    needs: str
    meets: Callable[[A], bool]
    why: str
    remedy: str


def refuse(asked: A, rules: Iterable[Rule[A]]) -> None:
    """Raise :class:`Conflict` for the first of ``rules`` whose condition holds for the settings ``asked``.

    Rules that read settings which ``asked`` does not have are skipped.
    """
    for rule in rules:
        if set(rule.needs.split()) <= vars(asked).keys() and rule.meets(asked):
            raise Conflict(f"{rule.why}; {rule.remedy}".format(asked), rule.name)
