"""A calculator for text that a model wrote: a parser of our own with bounds, so nothing is ever executed.

    sum     = product (("+" | "-") product)*
    product = operand (("*" | "/") operand)*
    operand = integer | "(" sum ")"

There are no signs, powers, names, functions or decimals: what is not in the grammar is an error.
"""

import re
from fractions import Fraction
from typing import NamedTuple

# ASCII digits only: `\d` and `int` know some sixty other scripts.
_TOKEN = re.compile(r"[ \t]*([0-9]+|[-+*/()])")
_SAME = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"})  # × · ÷ −


class ExpressionError(ValueError):
    """The text is no expression of the grammar, is beyond the bounds, or divides by zero."""


class Expression(NamedTuple):
    """What an expression is worth and the numbers in it, in order of appearance."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(text: str, *, max_length: int = 200, max_depth: int = 20, max_digits: int = 9) -> Expression:
    """Computes an expression exactly.

    With these bounds no intermediate value has more than max_length digits, and time is linear in the text.

    Args:
      text: such as "(3+5)*7/2"; blanks may stand between numbers and operators, and ×, ·, ÷, − for `* * / -`.
      max_length: in characters.
      max_depth: of nested parentheses.
      max_digits: of one number.

    Raises:
      ExpressionError: saying what is wrong with the text.
    """
    if len(text) > max_length:
        raise ExpressionError(f"{len(text)} characters: at most {max_length} are read")
    parser = _Parser(_tokens(text.translate(_SAME), max_digits), max_depth)
    value = parser.sum(0)
    if parser.ahead:
        raise ExpressionError(f"{parser.ahead!r} where an operator or the end should be")
    return Expression(value, tuple(parser.numbers))


def _tokens(text: str, max_digits: int) -> list[str]:
    text, tokens, at = text.rstrip(" \t\r\n"), [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"{text[at:].strip()[:1]!r} has no meaning in an expression")
        token, at = match[1], match.end()
        if len(token) > max_digits:
            raise ExpressionError(f"a number of {len(token)} digits: at most {max_digits} are read")
        if len(token) > 1 and token[0] == "0":
            raise ExpressionError(f"{token!r} has a leading zero")
        tokens.append(token)
    return tokens


class _Parser:
    """Recursive descent, one method a rule of the grammar."""

    def __init__(self, tokens: list[str], max_depth: int):
        self._left = tokens[::-1]
        self._max_depth = max_depth
        self.numbers: list[int] = []

    @property
    def ahead(self) -> str:
        """The next token, "" at the end."""
        return self._left[-1] if self._left else ""

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.ahead in ("+", "-"):
            sign = 1 if self._left.pop() == "+" else -1
            value += sign * self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._operand(depth)
        while self.ahead in ("*", "/"):
            operator, operand = self._left.pop(), self._operand(depth)
            if operator == "/" and operand == 0:
                raise ExpressionError("division by zero")
            value = value * operand if operator == "*" else value / operand
        return value

    def _operand(self, depth: int) -> Fraction:
        if self.ahead == "(":
            return self._parenthesis(depth + 1)
        if not self.ahead.isdigit():
            raise ExpressionError(f"{self.ahead or 'the end'!r} where a number should be")
        self.numbers.append(int(self._left.pop()))
        return Fraction(self.numbers[-1])

    def _parenthesis(self, depth: int) -> Fraction:
        if depth > self._max_depth:
            raise ExpressionError(f"parentheses nested deeper than {self._max_depth}")
        self._left.pop()
        value = self.sum(depth)
        if self.ahead != ")":
            raise ExpressionError(f"{self.ahead or 'the end'!r} where ')' should be")
        self._left.pop()
        return value
