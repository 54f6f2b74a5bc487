"""A small language of policies: expressions over named numbers, which can be searched, read, and run without risk.

An expression is Python of a kind that can do nothing but calculate: numbers, named features, ``+ - * /``, comparisons,
``a if b else c``, and a few functions. A function with assignments and ``if`` is read too, as models write them. What
is read is never run as it stands: it becomes a tree, and only the tree is run. Every operation gives a number for all
numbers, so that no expression fails.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import UsageError, nearest

#: Numbers beyond this size count as this size.
LARGEST = 1e30
#: The most nodes that a tree may have.
MOST_NODES = 200
#: The most characters that a source may have.
MOST_CHARACTERS = 20_000


@dataclass(frozen=True)
class Expression:
    """A node of an expression.

    Attributes:
        ``operation``: a key of :data:`OPERATIONS`, "number" or "feature".
        ``parts``: the expressions that the operation takes.
        ``value``: the number of a "number".
        ``name``: the feature of a "feature".
    """

    operation: str
    parts: tuple[Expression, ...] = ()
    value: float = 0.0
    name: str = ""
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        size = 1 + sum(part.size for part in self.parts)
        object.__setattr__(self, "size", size)

    @property
    def names(self) -> set[str]:
        """Features that the expression uses."""
        own = {self.name} if self.name else set()
        return own.union(*(part.names for part in self.parts))

    def __str__(self) -> str:
        if self.operation == "number":
            return f"{self.value:.6g}"
        if self.operation == "feature":
            return self.name
        return OPERATIONS[self.operation].text(*map(str, self.parts))


@dataclass(frozen=True)
class Operation:
    """An operation of the language. ``parts``: number of expressions to which it applies. ``run``: function that
    computes it. ``text``: function that returns the Python text of the operation, from the texts of its parts.
    """

    parts: int
    run: Callable[..., float]
    text: Callable[..., str]


def rounded(value: float) -> float:
    """Round ``value`` to the six digits with which expressions are written, so that an expression that is read back is
    the same.
    """
    return float(f"{value:.6g}")


def _bounded(value: float) -> float:
    if math.isnan(value):
        return 0.0
    return max(-LARGEST, min(LARGEST, value))


def _divide(a: float, b: float) -> float:
    """Return ``a / b``, and ``a`` itself where ``b`` is almost zero."""
    return a if abs(b) < 1e-9 else _bounded(a / b)


def _infix(sign: str) -> Callable[[str, str], str]:
    return lambda a, b: f"({a} {sign} {b})"


def _called(name: str) -> Callable[..., str]:
    return lambda *parts: f"{name}({', '.join(parts)})"


#: Every operation by its name.
OPERATIONS: dict[str, Operation] = {
    "+": Operation(2, lambda a, b: _bounded(a + b), _infix("+")),
    "-": Operation(2, lambda a, b: _bounded(a - b), _infix("-")),
    "*": Operation(2, lambda a, b: _bounded(a * b), _infix("*")),
    "/": Operation(2, _divide, _infix("/")),
    "<": Operation(2, lambda a, b: float(a < b), _infix("<")),
    "==": Operation(2, lambda a, b: float(a == b), _infix("==")),
    "min": Operation(2, min, _called("min")),
    "max": Operation(2, max, _called("max")),
    "neg": Operation(1, lambda a: -a, lambda a: f"(-{a})"),
    "abs": Operation(1, abs, _called("abs")),
    "sqrt": Operation(1, lambda a: math.sqrt(abs(a)), _called("sqrt")),
    "log1p": Operation(1, lambda a: math.log1p(abs(a)), _called("log1p")),
    "if": Operation(
        3, lambda a, b, c: b if a else c, lambda a, b, c: f"({b} if {a} else {c})"
    ),
}

#: The functions that a policy may call.
FUNCTIONS = ("min", "max", "abs", "sqrt", "log1p")

_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
}


def number(value: float) -> Expression:
    """Return an expression that is the constant ``value``."""
    return Expression("number", value=rounded(_bounded(value)))


def feature(name: str) -> Expression:
    """Return an expression whose value is the feature called ``name``, such as a queue's length."""
    return Expression("feature", name=name)


def parse_policy(source: str, features: Sequence[str]) -> Expression:
    """Parse an expression, or a Python function that returns one. ``source``: Python text. ``features``: the names that
    it may use. Raises :class:`UsageError` for everything that the language does not have, such as imports, attributes,
    loops and other names.
    """
    if len(source) > MOST_CHARACTERS:
        raise UsageError(
            f"a policy has at most {MOST_CHARACTERS:,} characters, this one has {len(source):,}"
        )
    try:
        tree = ast.parse(source.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UsageError(f"the policy is no Python: {error}") from None
    reader = _Reader(tuple(features))
    try:
        parsed = reader.program(tree.body)
    except RecursionError:
        raise UsageError("the policy is nested too deeply; write it flatter") from None
    if parsed.size > MOST_NODES:
        raise UsageError(
            f"a policy has at most {MOST_NODES} operations and names, this one has {parsed.size}"
        )
    return parsed


class _Reader:
    """Reads statements into expressions. ``features``: the names that they may use."""

    def __init__(self, features: tuple[str, ...]) -> None:
        self.features = features
        self.steps = 0

    def _step(self) -> None:
        """Count a step of reading, and end what would take long: every ``if`` reads what follows it twice."""
        self.steps += 1
        if self.steps > 20 * MOST_CHARACTERS:
            raise UsageError("the policy branches too often; write it with fewer if")

    def program(self, body: Sequence[ast.stmt]) -> Expression:
        """Read a whole source: an expression, or one function."""
        match body:
            case [ast.Expr(value=value)]:
                return self.expression(value, {})
            case [ast.FunctionDef() as function]:
                return self._function(function)
        raise UsageError("a policy is one expression, or one function that returns one")

    def _function(self, function: ast.FunctionDef) -> Expression:
        if function.decorator_list:
            raise UsageError("a policy's function has no decorators")
        body = function.body
        if (
            body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body = body[1:]  # its docstring
        result = self._block(body, {})
        if result is None:
            raise UsageError("a policy's function must end with return in every case")
        return result

    def _block(
        self, body: Sequence[ast.stmt], names: dict[str, Expression]
    ) -> Expression | None:
        """Return what statements return, or None if they end without a result; ``names`` gets their variables."""
        for place, statement in enumerate(body):
            self._step()
            match statement:
                case ast.Return(value=ast.expr() as value):
                    return self.expression(value, names)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    names[name] = self._limited(self.expression(value, names))
                case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                    both = ast.BinOp(ast.Name(name), op, value)
                    names[name] = self._limited(self.expression(both, names))
                case ast.If(test=test, body=then, orelse=other):
                    rest = body[place + 1 :]
                    asked = self.expression(test, names)
                    yes = self._block([*then, *rest], dict(names))
                    no = self._block([*other, *rest], dict(names))
                    if yes is None or no is None:
                        return None
                    return self._limited(Expression("if", (asked, yes, no)))
                case ast.Pass():
                    continue
                case _:
                    raise UsageError(_unknown(statement))
        return None

    def _limited(self, whole: Expression) -> Expression:
        """Return ``whole``, unless it is so large that going on would take long."""
        if whole.size > 50 * MOST_NODES:
            raise UsageError(
                "the policy uses its own variables too often; write it shorter"
            )
        return whole

    def expression(self, node: ast.expr, names: Mapping[str, Expression]) -> Expression:
        """Read an expression of Python. ``names``: variables that were assigned before."""
        self._step()

        def read(part: ast.expr) -> Expression:
            return self.expression(part, names)

        match node:
            case ast.Constant(value=bool() | int() | float() as value):
                return number(_number(value))
            case ast.Name(id=name):
                return self._name(name, names)
            case ast.UnaryOp(op=ast.USub(), operand=part):
                return Expression("neg", (read(part),))
            case ast.UnaryOp(op=ast.Not(), operand=part):
                return Expression("==", (read(part), number(0)))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
                return self._limited(
                    Expression(_SIGNS[type(op)], (read(left), read(right)))
                )
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._comparison(op, read(left), read(right))
            case ast.BoolOp(op=op, values=values):
                return self._together(
                    isinstance(op, ast.And), [read(v) for v in values]
                )
            case ast.IfExp(test=test, body=then, orelse=other):
                return Expression("if", (read(test), read(then), read(other)))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self._call(name, [read(part) for part in args])
            case ast.Call(
                func=ast.Attribute(ast.Name("math"), name), args=args, keywords=[]
            ):
                return self._call(name, [read(part) for part in args])
        raise UsageError(_unknown(node))

    def _name(self, name: str, names: Mapping[str, Expression]) -> Expression:
        if name in names:
            return names[name]
        if name not in self.features:
            raise UsageError(
                f"a policy cannot use {name!r}; {nearest(name, self.features)}"
            )
        return feature(name)

    def _comparison(self, op: ast.cmpop, a: Expression, b: Expression) -> Expression:
        def opposite(x: Expression) -> Expression:
            return Expression("==", (x, number(0)))

        match op:
            case ast.Lt():
                return Expression("<", (a, b))
            case ast.Gt():
                return Expression("<", (b, a))
            case ast.LtE():
                return opposite(Expression("<", (b, a)))
            case ast.GtE():
                return opposite(Expression("<", (a, b)))
            case ast.Eq():
                return Expression("==", (a, b))
            case ast.NotEq():
                return opposite(Expression("==", (a, b)))
        raise UsageError("a policy compares with <, <=, >, >=, == and != only")

    def _together(self, all_of: bool, parts: Sequence[Expression]) -> Expression:
        *first, last = parts
        for part in reversed(first):
            chosen = (last, number(0)) if all_of else (number(1), last)
            last = Expression("if", (part, *chosen))
        return last

    def _call(self, name: str, parts: Sequence[Expression]) -> Expression:
        named = {"log": "log1p", "fabs": "abs"}.get(name, name)
        if named not in FUNCTIONS:
            raise UsageError(
                f"a policy cannot call {name!r}; {nearest(name, FUNCTIONS)}"
            )
        takes = OPERATIONS[named].parts
        if takes == 2 and len(parts) > 2:
            return Expression(named, (parts[0], self._call(name, parts[1:])))
        if len(parts) != takes:
            raise UsageError(
                f"{name}() of a policy takes {takes} numbers, and gets {len(parts)} here"
            )
        return Expression(named, tuple(parts))


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return LARGEST


def _unknown(node: ast.AST) -> str:
    what = type(node).__name__
    return (
        f"a policy has no {what} (line {getattr(node, 'lineno', 1)}); use numbers, features, + - * /, comparisons, "
        "if, min, max, abs, sqrt and log1p"
    )


def run_of(
    expression: Expression, features: Sequence[str]
) -> Callable[[Sequence[float]], float]:
    """Return a function that computes ``expression`` from the values of ``features``, in their order.

    The result is a finite number for all finite values.
    """
    place = {name: index for index, name in enumerate(features)}

    def built(node: Expression) -> Callable[[Sequence[float]], float]:
        if node.operation == "number":
            value = node.value
            return lambda _: value
        if node.operation == "feature":
            index = place[node.name]
            return lambda values: values[index]
        run = OPERATIONS[node.operation].run
        parts: list[Any] = [built(part) for part in node.parts]
        if len(parts) == 1:
            only = parts[0]
            return lambda values: run(only(values))
        if len(parts) == 2:
            left, right = parts
            return lambda values: run(left(values), right(values))
        asked, yes, no = parts
        return lambda values: yes(values) if asked(values) else no(values)

    return built(expression)
