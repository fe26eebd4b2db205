"""Formulas compared by the package math-verify; `scoring.math_verify` runs this in processes that can be killed."""

import logging

import math_verify

# With its own limits off it warns, at every call, that there must be another one: there is.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(answer: str, completion: str) -> float | None:
    """Returns 1.0 if the completion's answer equals the one wanted, else 0.0; None if that one cannot be parsed.

    It may take for ever, as sympy may.

    Args:
      answer: a formula in LaTeX with or without its delimiters, or plain.
      completion: any text.
    """
    wanted = _parse(answer) or _parse(f"${answer}$")
    return float(math_verify.verify(wanted, _parse(completion), timeout_seconds=None)) if wanted else None


def _parse(text: str) -> list:
    # Its own limits work by signals, on the main thread alone.
    return math_verify.parse(text, parsing_timeout=None)
