"""Ranges of options, written beside their types and checked once, before anything is compiled.

@dataclasses.dataclass(frozen=True)
class Config:
    steps: Positive = 100
    dropout: Annotated[float, Between(0, 1)] = 0.0

check(Config(steps=0))     # ValueError: --steps=0: must be at least 1
"""

import dataclasses
import math
import typing
from typing import Annotated, Protocol


class Range(Protocol):
    """What an option may be."""

    def allows(self, value) -> bool: ...


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Numbers from `low` on."""

    low: float

    def allows(self, value) -> bool:
        return value >= self.low

    def __str__(self) -> str:
        return f"at least {self.low:g}"


@dataclasses.dataclass(frozen=True)
class Above:
    """Finite numbers greater than `low`."""

    low: float

    def allows(self, value) -> bool:
        return self.low < value < math.inf

    def __str__(self) -> str:
        return f"greater than {self.low:g}"


@dataclasses.dataclass(frozen=True)
class Between:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float

    def allows(self, value) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"between {self.low:g} and {self.high:g}"


@dataclasses.dataclass(frozen=True)
class Only:
    """One value, since the others make no sense here."""

    value: float
    why: str

    def allows(self, value) -> bool:
        return value == self.value

    def __str__(self) -> str:
        return f"{self.value:g}, {self.why}"


Positive = Annotated[int, AtLeast(1)]
NonNegative = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0)]
NonNegativeFloat = Annotated[float, AtLeast(0)]
Share = Annotated[float, Between(0, 1)]


def flag(name: str) -> str:
    """The option of a field as it is typed."""
    return f"--{name.strip('_').replace('_', '-')}"


def check(options) -> None:
    """Checks every field of a dataclass that is annotated with a range; None passes, of a tuple each entry is checked.

    Raises:
      ValueError: naming the option as it is typed, its value and what is allowed.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        for entry in value if isinstance(value, tuple) else (value,):
            for bound in _ranges(hints[field.name]):
                if entry is not None and not bound.allows(entry):
                    raise ValueError(f"{flag(field.name)}={entry}: must be {bound}")


def _ranges(hint) -> list[Range]:
    """The ranges in an annotation, e.g. of `Positive`, `Positive | None` or `tuple[Positive, ...]`."""
    if typing.get_origin(hint) is Annotated:
        return [part for part in hint.__metadata__ if hasattr(part, "allows")] + _ranges(hint.__origin__)
    return [bound for part in typing.get_args(hint) for bound in _ranges(part)]
