"""Arithmetic of a text by a parser that knows numbers, + - * / and brackets, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fractions import Fraction

#: Characters of an expression that is read; the parser never sees more.
LONGEST = 200
#: All characters that an expression may have.
ALLOWED = re.compile(r"[0-9+\-*/(). ]+", re.ASCII)
#: The operations, by their nodes; all others are refused.
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def parsed_arithmetic(text: str) -> ast.expr:
    """Parse an expression such as "3*(5+7)" without evaluating it, and return its syntax tree.

    Raises :class:`ValueError` in one line for a text that is no such expression or is too long.
    """
    expression = text.strip()
    if len(expression) > LONGEST:
        raise ValueError(
            f"it has {len(expression)} characters, more than the {LONGEST} that are read"
        )
    if not ALLOWED.fullmatch(expression):
        raise ValueError("it has other characters than digits, + - * / ( ) and points")
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("it is no expression") from None


def arithmetic_value(tree: ast.expr, signed: bool = True) -> Fraction:
    """Return the exact value of an expression's tree, which :func:`parsed_arithmetic` returned.

    ``signed``: whether a number may have a sign of its own. Raises :class:`ValueError` if the tree contains anything
    but numbers and the four operations, and :class:`ZeroDivisionError` for a division by 0.
    """
    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        return Fraction(str(tree.value))
    if isinstance(tree, ast.BinOp) and type(tree.op) in SIGNS:
        left, right = (arithmetic_value(side, signed) for side in (tree.left, tree.right))  # fmt: skip
        return combined(SIGNS[type(tree.op)], left, right)
    if signed and isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub | ast.UAdd):  # fmt: skip
        value = arithmetic_value(tree.operand, signed)
        return -value if isinstance(tree.op, ast.USub) else value
    raise ValueError("it has more than numbers, + - * / and brackets")


def combined(sign: str, first: Fraction, second: Fraction) -> Fraction:
    """Return the result of the arithmetic operation ``sign``, one of + - * /, on the numbers ``first`` and ``second``.

    Raises :class:`ZeroDivisionError` for a division by 0.
    """
    if sign == "+":
        return first + second
    if sign == "-":
        return first - second
    return first * second if sign == "*" else first / second


def numbers_in(tree: ast.expr) -> Iterator[Fraction]:
    """Yield all numbers in an expression's tree, which :func:`parsed_arithmetic` returned, in any order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            yield Fraction(str(node.value))
