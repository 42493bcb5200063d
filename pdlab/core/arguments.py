"""Readers of words of a command line, and bounds that several commands share."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdlab.core.errors import UsageError
from pdlab.core.transports import no_backend, no_transport

if TYPE_CHECKING:
    from pdlab.core.length_distribution import LengthDistribution

SLO_QUANTILE = 0.95  # default share of requests within an SLO
MAX_SEED = 2**63 - 1
MAX_TOKENS = 100_000_000  # per request: more than the context of any model
MAX_REPEATS = 1000
MAX_HOLD_S = 86_400  # a day, for one request rate
MAX_REQUESTS = 1_000_000  # per level, because their prompts are drawn before it
MIN_RATE_RPS = 1e-4  # one request in three hours
MAX_LOAD = 100_000  # requests in flight, or per second: far more than one load generator can send
MODEL_HELP = "a name in configs/models/, a file of that form, a Hugging Face id, a folder, or a config.json"
LENGTHS_HELP = (
    "distribution of the lengths: fixed (default), uniform:0.8-1.0 (shares of the nominal length), "
    "lognormal:SIGMA[,median][,max=TOKENS]; or, in place of nominal lengths, file:PAIRS.csv or "
    "mixes:INPUT:OUTPUT,...,every=S (docs/methodology.md)"
)


def positive(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError, as all readers here."""
    return checked_whole_number(text, 1, 10**18 - 1, "a whole number of at least 1")


def checked_whole_number(text: str, low: int, high: int, expected: str) -> int:
    """A whole number from ``low`` to ``high``. The message of the error has ``expected``."""
    if not re.fullmatch(r"\s*[0-9]{1,20}\s*", text) or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas; each once, in ascending order."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def above_zero(text: str) -> float:
    """A number above 0."""
    return checked_number(text, lambda value: 0 < value < math.inf, "a number above 0")


def lengths(text: str) -> LengthDistribution:
    """A distribution of lengths, with the pairs of its file."""
    from pdlab.core.lengths import parse_lengths

    try:
        return parse_lengths(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def checked_number(text: str, accepts: Callable[[float], bool], expected: str) -> float:
    """A number for which ``accepts`` is true. The message of the error has ``expected``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not accepts(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


def backends(text: str) -> tuple[str, ...]:
    """Names of NIXL backends, separated by commas, each once."""
    names = tuple(part.strip() for part in text.split(","))
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise argparse.ArgumentTypeError(f"{text!r}: {twice} is there twice; keep one")
    if reason := no_backend(names):
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}")
    return names


def ucx_transports(text: str) -> str:
    """A value of UCX_TLS."""
    if reason := no_transport(text):
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}")
    return text
