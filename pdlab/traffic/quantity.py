"""A varying number of tokens, turns or seconds: a nominal value, and a distribution around it.

The kinds are those of request lengths (`pdlab.core.lengths`) and the geometric distribution, which numbers of turns
follow where each turn is the last one with the same chance.
"""

from __future__ import annotations

import math
import random
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from pdlab.core.errors import UsageError
from pdlab.core.lengths import FIXED, Fixed, Lognormal, Uniform, parse_lengths
from pdlab.core.schema import Finite

FORMS_S = "20, 20 uniform:0.5-1.5 or 20 lognormal:0.8[,median][,max=SECONDS]"
FORMS = "60, 60 uniform:0.5-1.5, 60 lognormal:0.8[,median][,max=TOKENS] or 60 geometric[:max=N]"
MS = 1000


class Quantity(Finite):
    """``nominal`` is the mean (the median, if ``around`` is by the median). ``most``: of a geometric distribution."""

    nominal: float = Field(ge=0, le=1e12)
    around: Fixed | Uniform | Lognormal = FIXED
    geometric: bool = False
    most: int | None = Field(default=None, ge=1)

    def whole(self, rng: random.Random) -> int:
        """A number of tokens or turns, at least 1."""
        if self.geometric:
            return self._geometric(rng)
        return self._drawn(max(1, round(self.nominal)), rng, 1)

    def seconds(self, rng: random.Random) -> float:
        """A time, in whole milliseconds; 0 where the nominal value is 0. Not of a geometric distribution."""
        nominal_ms = round(MS * self.nominal)
        return self._drawn(nominal_ms, rng, MS) / MS if nominal_ms else 0.0

    def _drawn(self, nominal: int, rng: random.Random, per_unit: int) -> int:
        """In ``per_unit``-ths of the unit in which the limit is written."""
        around = self.around
        if isinstance(around, Lognormal) and around.most_tokens is not None:
            # Its limit is of a pair, of which the second is 1 here.
            around = around.model_copy(update={"most_tokens": per_unit * around.most_tokens + 1})
        return next(around.sequence((nominal, 1), rng))[0]

    def _geometric(self, rng: random.Random) -> int:
        """By inversion: P(n) = p (1 - p)^(n - 1) with p = 1 / nominal, cut at ``most``."""
        if self.nominal <= 1:
            return 1
        number = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / self.nominal))
        return number if self.most is None else min(number, self.most)


def _read(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    number, _, kind = str(value).strip().partition(" ")
    try:
        nominal = float(number)
    except ValueError as error:
        raise ValueError(f"{value!r} is no quantity; give {FORMS}") from error
    kind = kind.strip()
    if match := re.fullmatch(r"geometric(?::max=(\d{1,9}))?", kind):
        return Quantity(nominal=nominal, geometric=True, most=int(match[1]) if match[1] else None)
    try:
        around = parse_lengths(kind) if kind else FIXED
    except UsageError as error:
        raise ValueError(f"{value!r}: {error}") from error
    if not isinstance(around, Fixed | Uniform | Lognormal):
        raise ValueError(f"{value!r}: lengths of a file or of mixes are no quantity; give {FORMS}")
    return Quantity(nominal=nominal, around=around)


def _continuous(quantity: Quantity) -> Quantity:
    if quantity.geometric:
        raise ValueError(f"geometric is of whole numbers, and this is a time; give {FORMS_S}")
    return quantity


Varying = Annotated[Quantity, BeforeValidator(_read)]
"""A quantity as a workload file writes it, in one of `FORMS`."""
VaryingSeconds = Annotated[Varying, AfterValidator(_continuous)]
"""A time, in one of `FORMS_S`."""
