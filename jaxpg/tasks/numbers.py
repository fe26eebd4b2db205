r"""Numbers in what a model wrote: "$1,234.50", "-3", "50%", "1/2", "\frac{1}{2}", "7 apples", compared as fractions.

Bounded in every part, so that reading takes time linear in the text, and nothing is ever executed. Digits are ASCII's;
there are no powers and no 1e9: what they are worth is not guessed from the digits they are written with.
"""

import re
from fractions import Fraction
from typing import NamedTuple

_NUMBER = r"""(?:
    (?: [0-9]{1,3}(?:,[0-9]{3}){1,10}+(?![0-9]) | [0-9]{1,50}+ ) (?:\.[0-9]{1,50}+)?+
  | (?<![0-9.])\.[0-9]{1,50}+
)(?!\.?[0-9])"""
_QUANTITY = re.compile(
    rf"""
    (?P<sign>(?<![0-9A-Za-z_)\]}}-])-)? [$€£]? (?P<sign_inside>(?<=[$€£])-)?
    (?<![0-9A-Za-z_^])(?<!\^\{{)(?<![0-9]\.)(?<![0-9]\*\*)  # not in x2, 10^6, 1.2.3, 2**3
    (?:(?P<whole>[0-9]{{1,9}})(?:\ {{1,2}}(?=[0-9]{{1,9}}/)|\ ?(?=\\[dt]?frac)))?
    (?:
        \\[dt]?frac\ ?(?:\{{\ ?(?P<top>-?{_NUMBER})\ ?\}}|(?P<top_digit>[0-9]))
                   \ ?(?:\{{\ ?(?P<bottom>{_NUMBER})\ ?\}}|(?P<bottom_digit>[0-9]))
      | (?P<plain>{_NUMBER})(?:\ ?/\ ?(?P<over>{_NUMBER}))?+
    )
    (?!\^|\*\*[0-9]|[A-Za-z_]{{1,3}}[+-]?[0-9])   # not in 10^6, 2**3, 1e9, 0x1, 1_000
    (?P<percent>\ ?(?:%|percent\b))?
    """,
    re.VERBOSE,
)

# LaTeX and typography that change how a number looks and not what it is.
_HARMLESS = [
    (re.compile("\u2212"), "-"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,!;:]|\\left\b|\\right\b|\\[()\[\]]|\^\{?\\circ\}?"), ""),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|operatorname)\ ?\{"), " "),
    (re.compile(r"\\ |\\quad\b|~|\s"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
]
_LATEX = re.compile(r"\\(?![dt]?frac\b|[dt]?frac[0-9])")
_BOXED = re.compile(r"\\(?:boxed|fbox) ?\{")
_MARKED = re.compile(r"####[ \t]*([^\n#]*)")
_LONGEST = 500  # characters of a marked answer


class Quantity(NamedTuple):
    """A number and whether a percent sign follows it."""

    value: Fraction
    percent: bool


def read(text: str) -> Quantity | None:
    """Reads a text that states one number, with what may stand around it: a unit, a currency, "x =".

    Returns:
      The number; None if there is none, more than one, or one inside a formula such as a root.
    """
    text = _clean(text[: _LONGEST + 1]).rpartition("=")[2]
    if len(text) > _LONGEST or _LATEX.search(text):
        return None
    found = [_value(match) for match in _QUANTITY.finditer(text)]
    return found[0] if len(found) == 1 else None


def answer(completion: str, *, strict: bool = False) -> Quantity | None:
    r"""Finds the answer in a completion: after the last "#### ", else in the last \boxed{}, else its last number.

    Args:
      completion: any text.
      strict: without the last resort, so that an answer must be marked as one.

    Returns:
      The number, None where there is none.
    """
    # "#### Step 1: add" is a heading, no answer: hence only a line that states one number counts.
    marked = [line for line in _MARKED.findall(completion) if read(line) is not None]
    if marked:
        return read(marked[-1])
    inside = boxed(completion)
    found = None if inside is None else read(inside)
    return last(completion) if found is None and not strict else found


def last(text: str) -> Quantity | None:
    """Returns the last number in a text, None if there is none."""
    found = None
    for found in _QUANTITY.finditer(_clean(text)):  # noqa: B007
        pass
    return found and _value(found)


def boxed(text: str) -> str | None:
    r"""Returns what stands in the last \boxed{}, braces within it matched; None without one, or if it never closes."""
    start = None
    for start in _BOXED.finditer(text):  # noqa: B007
        pass
    if start is None:
        return None
    depth = 1
    for at in range(start.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start.end() : at]
    return None


def equal(a: Quantity | None, b: Quantity | None) -> bool:
    """Says whether two numbers are the same. A percent sign may count as a unit (50% is 50) or as 1/100."""
    return a is not None and b is not None and not _readings(a).isdisjoint(_readings(b))


def _readings(quantity: Quantity) -> set[Fraction]:
    return {quantity.value, quantity.value / 100} if quantity.percent else {quantity.value}


def _clean(text: str) -> str:
    for pattern, replacement in _HARMLESS:
        text = pattern.sub(replacement, text)
    return text


def _value(match: re.Match) -> Quantity | None:
    """What a match of _QUANTITY is worth, None for a division by zero."""
    top = _fraction(match["top"] or match["top_digit"] or match["plain"])
    bottom = _fraction(match["bottom"] or match["bottom_digit"] or match["over"] or "1")
    if bottom == 0:
        return None
    value = int(match["whole"] or 0) + top / bottom
    return Quantity(-value if match["sign"] or match["sign_inside"] else value, match["percent"] is not None)


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
