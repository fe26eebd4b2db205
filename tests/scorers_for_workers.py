"""Scorers that misbehave, in a module that worker processes can import."""

import os
import time


def slow_if_told(problem, completion):
    if completion == "hang":
        while True:
            pass
    if completion == "sleep":
        time.sleep(3600)
    if completion == "hang in C":
        return 7 ** (10**9)  # never returns to the interpreter, so that no thread in the process could end it
    if completion == "exit":
        os._exit(3)
    if completion == "raise":
        raise KeyError("no")
    if completion == "hoard":
        return len(bytearray(1 << 40))
    if completion == "print":
        print("into the caller's output" * 10000)
    return float(len(completion)) + problem


def process(problem, completion):
    if completion == "hang in C":
        return 7 ** (10**9)
    return float(os.getpid())


def fails_once(folder, completion):
    """Fails on the first attempt for each completion."""
    path = os.path.join(folder, completion)
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(1)
    return 1.0


class CannotStart:
    def __reduce__(self):
        return time.sleep, (3600,)
