"""Lengths of requests: fixed, uniform, lognormal, from the pairs of a file, or mixes that change with time
(`pdlab.core.mixes`); drawn by seed.

Draws use only `random.Random.random` and inverses of distribution functions, which are the same in every version of
Python. So a seed gives one sequence everywhere, and a longer draw begins with the shorter one.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pdlab.core import mixes
from pdlab.core.errors import UsageError, reason_of
from pdlab.core.length_distribution import LengthDistribution, LengthsOfFile, MeanTokens, Pair
from pdlab.core.mixes import Mixes
from pdlab.core.replayed import Replayed
from pdlab.core.text import counted

# Names of the columns in published traces and data sets.
INPUTS = ("input_tokens", "contexttokens", "num_prefill_tokens", "input_length", "request_tokens")
OUTPUTS = ("output_tokens", "generatedtokens", "num_decode_tokens", "output_length", "response_tokens")
MOST_PAIRS = 1_000_000
FORMS = f"fixed, uniform:0.8-1.0, lognormal:0.5[,median][,max=TOKENS], file:PAIRS.csv or {mixes.FORM}"
# A lognormal distribution has no longest value: it is cut at this many standard deviations of its logarithm.
CUT = 3.0
GRID = 256
NORMAL = NormalDist()
OUTSIDE = NORMAL.cdf(-CUT)


class Fixed(LengthDistribution):
    """Every request has the nominal lengths."""

    kind: Literal["fixed"] = "fixed"

    @property
    def label(self) -> str:
        return ""

    @property
    def flag_value(self) -> str:
        return "fixed"

    def mean(self, nominal: Pair) -> MeanTokens:
        return MeanTokens(*nominal)

    def shortest_input(self, nominal: Pair) -> int:
        return nominal[0]

    def longest(self, nominal: Pair) -> Pair:
        return nominal

    def sequence(self, nominal: Pair, rng: random.Random) -> Iterator[Pair]:
        while True:
            yield nominal


class Uniform(LengthDistribution):
    """Input and output each uniform from ``low`` to ``high`` times the nominal length, with both ends; at least one
    token.

    InferenceX draws from 0.8 to 1.0 (its ``--random-range-ratio 0.8``).
    """

    kind: Literal["uniform"] = "uniform"
    low: float = Field(ge=0, le=10)
    high: float = Field(gt=0, le=10)

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.low >= self.high:
            raise ValueError(f"uniform: from a smaller share to a larger one, got {_share(self.low)}-{self.high:g}")
        return self

    @property
    def label(self) -> str:
        return f"uniform {_share(self.low)}-{_share(self.high)}"

    @property
    def flag_value(self) -> str:
        return f"uniform:{_share(self.low)}-{_share(self.high)}"

    def _ends(self, tokens: int) -> Pair:
        return max(1, round(self.low * tokens)), max(1, round(self.high * tokens))

    def mean(self, nominal: Pair) -> MeanTokens:
        return MeanTokens(*(sum(self._ends(tokens)) / 2 for tokens in nominal))

    def shortest_input(self, nominal: Pair) -> int:
        return self._ends(nominal[0])[0]

    def longest(self, nominal: Pair) -> Pair:
        return self._ends(nominal[0])[1], self._ends(nominal[1])[1]

    def sequence(self, nominal: Pair, rng: random.Random) -> Iterator[Pair]:
        (low_in, high_in), (low_out, high_out) = map(self._ends, nominal)
        while True:
            yield (
                low_in + int(rng.random() * (high_in - low_in + 1)),
                low_out + int(rng.random() * (high_out - low_out + 1)),
            )


class Lognormal(LengthDistribution):
    """Input and output each lognormal, cut at 3 sigma on both sides. A nominal length of 1 stays 1.

    ``sigma``: standard deviation of the logarithm. ``nominal``: whether the nominal length is the mean (after the cut)
    or the median. ``most_tokens``: most tokens of a request, input and output together; a longer request loses input.
    """

    kind: Literal["lognormal"] = "lognormal"
    sigma: float = Field(gt=0, le=3)
    nominal: Literal["mean", "median"] = "mean"
    most_tokens: int | None = Field(default=None, ge=2)

    @property
    def label(self) -> str:
        words = [f"lognormal {self.sigma:g}"]
        words += ["around the median"] if self.nominal == "median" else []
        words += [f"up to {self.most_tokens}"] if self.most_tokens is not None else []
        return " ".join(words)

    @property
    def flag_value(self) -> str:
        words = [f"lognormal:{self.sigma:g}"]
        words += ["median"] if self.nominal == "median" else []
        words += [f"max={self.most_tokens}"] if self.most_tokens is not None else []
        return ",".join(words)

    def _tokens(self, tokens: int, share: float) -> int:
        """The quantile ``share`` of the distribution, from 0 (the shortest length) to 1 (the longest)."""
        if tokens == 1:
            return 1
        deviations = CUT * (2 * share - 1)
        if 0 < share < 1:
            deviations = NORMAL.inv_cdf(OUTSIDE + share * (1 - 2 * OUTSIDE))
        return max(1, round(self._median(tokens) * math.exp(self.sigma * deviations)))

    def _median(self, tokens: int) -> float:
        if self.nominal == "median":
            return tokens
        # The mean of exp(sigma z), z normal between -CUT and CUT.
        inside = NORMAL.cdf(CUT - self.sigma) - NORMAL.cdf(-CUT - self.sigma)
        return tokens / (math.exp(self.sigma**2 / 2) * inside / (1 - 2 * OUTSIDE))

    def _clipped(self, inputs: int, outputs: int) -> Pair:
        if self.most_tokens is None:
            return inputs, outputs
        outputs = min(outputs, self.most_tokens - 1)
        return min(inputs, self.most_tokens - outputs), outputs

    def mean(self, nominal: Pair) -> MeanTokens:
        return _mean_of(self, nominal)

    def shortest_input(self, nominal: Pair) -> int:
        shortest, longest = self._tokens(nominal[0], 0.0), self._tokens(nominal[1], 1.0)
        return self._clipped(shortest, longest)[0]

    def longest(self, nominal: Pair) -> Pair:
        return self._clipped(self._tokens(nominal[0], 1.0), self._tokens(nominal[1], 1.0))

    def longest_input(self, nominal: Pair) -> int:
        return self._clipped(self._tokens(nominal[0], 1.0), self._tokens(nominal[1], 0.0))[0]

    def sequence(self, nominal: Pair, rng: random.Random) -> Iterator[Pair]:
        while True:
            inputs = self._tokens(nominal[0], rng.random())
            yield self._clipped(inputs, self._tokens(nominal[1], rng.random()))


@lru_cache(maxsize=64)
def _mean_of(lengths: Lognormal, nominal: Pair) -> MeanTokens:
    """The mean over a grid of quantiles, because rounding and clipping have no closed form."""
    inputs, outputs = ([lengths._tokens(tokens, (k + 0.5) / GRID) for k in range(GRID)] for tokens in nominal)
    if lengths.most_tokens is None:
        return MeanTokens(fmean(inputs), fmean(outputs))
    pairs = [lengths._clipped(a, b) for a in inputs for b in outputs]
    return MeanTokens(fmean(a for a, _ in pairs), fmean(b for _, b in pairs))


class Pairs(LengthsOfFile):
    """The (input, output) pairs of a file in random order, then all of them in another random order, and so on.

    ``sha256``: hash of the pairs, independent of the file's format. Results keep neither the pairs nor the path.
    """

    kind: Literal["file"] = "file"
    pairs: tuple[Pair, ...] = Field(default=(), exclude=True, repr=False)

    @property
    def label(self) -> str:
        return f"file {self.name} {self.sha256[:8]}"

    @property
    def flag_value(self) -> str:
        return f"file:{self.path or self.name}"

    @property
    def identity(self) -> str:
        return f"file {self.sha256}"

    def sequence(self, nominal: Pair, rng: random.Random) -> Iterator[Pair]:
        if not self.pairs:
            raise UsageError(
                f"the lengths in {self.name} are not kept with results, so their requests cannot be drawn again; "
                f"give --lengths file:{self.name}"
            )
        count = len(self.pairs)
        while True:
            moved: dict[int, int] = {}  # Fisher-Yates shuffle that does only the work for the pairs that are drawn
            for place in range(count):
                other = place + int(rng.random() * (count - place))
                yield self.pairs[moved.get(other, other)]
                moved[other] = moved.get(place, place)


Lengths = Annotated[Fixed | Uniform | Lognormal | Pairs | Mixes | Replayed, Field(discriminator="kind")]
FIXED = Fixed()


def parse_lengths(text: str) -> Fixed | Uniform | Lognormal | Pairs | Mixes:
    """``fixed``, ``uniform:0.8-1.0``, ``lognormal:0.5,median,max=8192``, ``file:PAIRS.csv`` or
    ``mixes:5000:250,1000:1000,every=60``.

    Raises UsageError, without the name of the flag or key.
    """
    kind, colon, rest = text.strip().partition(":")
    if text.strip() == "fixed":
        return FIXED
    if kind == "file" and colon:
        return read_pairs(Path(rest.strip()))
    if kind == "mixes" and colon:
        return mixes.parse_mixes(rest.strip())
    number = r"(\d+\.?\d*|\.\d+)"
    try:
        if kind == "uniform" and (match := re.fullmatch(rf"{number}-{number}", rest)):
            if float(match[1]) == float(match[2]) == 1:
                return FIXED  # the same requests, so the same label
            return Uniform(low=float(match[1]), high=float(match[2]))
        if kind == "lognormal" and (match := re.fullmatch(rf"{number}(,median)?(?:,max=(\d{{1,9}}))?", rest)):
            return Lognormal(
                sigma=float(match[1]),
                nominal="median" if match[2] else "mean",
                most_tokens=int(match[3]) if match[3] else None,
            )
    except ValueError as error:
        rule = {
            "uniform": "two different shares of the nominal length from 0 to 10, the smaller one first",
            "lognormal": "a sigma above 0 and at most 3, and at least 2 tokens",
        }[kind]
        raise UsageError(f"{text!r}: {kind} takes {rule}") from error
    raise UsageError(f"{text!r} is no distribution of lengths; give {FORMS}")


def relative_to_folder(workload: Any, folder: Path) -> Any:
    """A workload from a YAML file in ``folder``. The path of its file of pairs may be relative to ``folder``."""
    lengths = workload.get("lengths") if isinstance(workload, Mapping) else None
    if not isinstance(lengths, str) or not lengths.startswith("file:"):
        return workload
    path = folder / lengths.removeprefix("file:").strip()
    return {**workload, "lengths": f"file:{path}"} if path.is_file() else workload


def read_pairs(path: Path) -> Pairs:
    """Pairs from CSV with a line of column names, or from JSON Lines (``*.jsonl``, ``*.json``) with the same keys.

    Raises UsageError with the file, the line and the rule.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read ({reason_of(error)}); give a CSV or JSON Lines file of lengths"
        ) from error
    rows = _json_rows(path, text) if path.suffix.lower() in (".jsonl", ".json") else _csv_rows(path, text)
    pairs = tuple(
        (whole_tokens(input_tokens, where), whole_tokens(output_tokens, where))
        for where, input_tokens, output_tokens in rows
    )
    if not 1 <= len(pairs) <= MOST_PAIRS:
        raise UsageError(f"{path}: holds {counted(len(pairs), 'request')}; from 1 to {MOST_PAIRS} can be drawn from")
    inputs, outputs = zip(*pairs, strict=True)
    return Pairs(
        name=path.name,
        sha256=hashlib.sha256("\n".join(f"{a}:{b}" for a, b in pairs).encode()).hexdigest(),
        requests=len(pairs),
        mean_tokens=(fmean(inputs), fmean(outputs)),
        longest_request=max(pairs, key=sum),
        input_range=(min(inputs), max(inputs)),
        path=str(path),
        pairs=pairs,
    )


def column_name(text: str) -> str:
    """The name of a column in the spelling of `INPUTS` and `OUTPUTS`: ``Request tokens`` is ``request_tokens``."""
    return "_".join(text.lower().split())


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, object, object]]:
    rows = list(csv.reader(text.splitlines()))
    names = [column_name(name) for name in rows[0]] if rows else []
    first, second = (next((names.index(name) for name in known if name in names), None) for known in (INPUTS, OUTPUTS))
    if first is None or second is None:
        raise UsageError(
            f"{path}: needs the columns input_tokens and output_tokens in its first line (found: {', '.join(names)})"
        )
    for number, row in enumerate(rows[1:], start=2):
        where = f"{path}, line {number}"
        if not any(cell.strip() for cell in row):
            continue
        if len(row) < len(names):
            raise UsageError(f"{where}: {counted(len(row), 'cell')} for {counted(len(names), 'column')}")
        yield where, row[first], row[second]


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, object, object]]:
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where}: is no JSON; give one object per line") from error
        keys = {column_name(str(key)): value for key, value in row.items()} if isinstance(row, dict) else {}
        yield where, _first(keys, INPUTS, where), _first(keys, OUTPUTS, where)


def _first(row: Mapping[str, object], names: Sequence[str], where: str) -> object:
    for name in names:
        if name in row:
            return row[name]
    raise UsageError(f'{where}: needs {names[0]}, as {{"input_tokens": 5000, "output_tokens": 250}}')


def whole_tokens(value: object, where: str) -> int:
    """A cell as a number of tokens. Raises UsageError."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (number >= 1 and math.isfinite(number) and number == int(number)):
        raise UsageError(f"{where}: {value!r} is not a number of tokens; use a whole number of at least 1")
    return int(number)


def _share(value: float) -> str:
    """``0.8``, ``1.0``: a share with at least one decimal."""
    return f"{value:g}" if value % 1 else f"{value:.1f}"
