"""Scorers of the tests' own, named by --scorers as a user names theirs: own_scorers:two_or_more.

An untrained model gets no sum right: these reward what it can do, so that there is a signal.
"""

import os
import signal

import jax


def two_or_more(problem, completion):
    """Rewards completions of two or more characters."""
    return float(len(completion) >= 2)


def odd(problem, completion):
    """Rewards completions of an odd number of characters."""
    return float(len(completion) % 2)


def constant(problem, completion):
    """Rewards everything."""
    return 1.0


def failing(problem, completion):
    """Fails on short completions."""
    if len(completion) < 2:
        raise OSError("no compiler")
    return 1.0


def wrong_in_one(problem, completion):
    """Meets an error or Ctrl-C in the process WRONG_IN, as WRONG_WHERE says; else `two_or_more`."""
    if jax.process_index() == int(os.environ.get("WRONG_IN", -1)):
        if os.environ["WRONG_WHERE"] == "scorer":
            raise OSError("no compiler")
        if os.environ["WRONG_WHERE"] == "interrupt":
            signal.raise_signal(signal.SIGINT)
    return two_or_more(problem, completion)
