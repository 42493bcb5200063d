"""Lengths of requests: what is drawn keeps its bounds and its mean, one seed is one sequence, a file comes back."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.core.errors import UsageError
from pdlab.core.lengths import (
    FIXED,
    LengthDistribution,
    Lognormal,
    Pair,
    Pairs,
    Uniform,
    parse_lengths,
    read_pairs,
    relative_to_folder,
)

PAIRS = ((100, 20), (2000, 300), (8000, 1), (100, 20), (7, 900))
NOMINAL = st.tuples(st.integers(1, 20_000), st.integers(1, 2000))


def file_of(folder: Path, pairs: tuple[Pair, ...] = PAIRS) -> Path:
    path = folder / "pairs.csv"
    path.write_text("input_tokens,output_tokens\n" + "".join(f"{a},{b}\n" for a, b in pairs))
    return path


def pairs_of(pairs: tuple[Pair, ...]) -> Pairs:
    inputs, outputs = zip(*pairs, strict=True)
    return Pairs(
        name="pairs.csv",
        sha256=str(pairs),
        requests=len(pairs),
        mean_tokens=(fmean(inputs), fmean(outputs)),
        longest_request=max(pairs, key=sum),
        input_range=(min(inputs), max(inputs)),
        pairs=pairs,
    )


@st.composite
def distributions(draw: st.DrawFn) -> tuple[LengthDistribution, Pair]:
    nominal = draw(NOMINAL)
    kind = draw(st.sampled_from(["fixed", "uniform", "lognormal", "file"]))
    if kind == "fixed":
        return FIXED, nominal
    if kind == "uniform":
        low = draw(st.floats(0.01, 2))
        return Uniform(low=low, high=low + draw(st.floats(0.01, 2))), nominal
    if kind == "lognormal":
        most = draw(st.none() | st.integers(sum(nominal), 4 * sum(nominal)))
        centre = draw(st.sampled_from(["mean", "median"]))
        return Lognormal(sigma=draw(st.floats(0.05, 2)), nominal=centre, most_tokens=most), nominal  # type: ignore[arg-type]
    return pairs_of(tuple(draw(st.lists(NOMINAL, min_size=1, max_size=30)))), nominal


@given(distributions(), st.text(max_size=8))
def test_draws_are_within_the_stated_range(made: tuple[LengthDistribution, Pair], seed: str) -> None:
    lengths, nominal = made
    drawn = lengths.draw(nominal, 200, seed)
    assert len(drawn) == 200
    assert max(map(sum, drawn)) <= sum(lengths.longest(nominal))
    assert lengths.shortest_input(nominal) <= min(a for a, _ in drawn)
    assert max(a for a, _ in drawn) <= lengths.longest_input(nominal)
    assert min(min(pair) for pair in drawn) >= 1


@given(distributions(), st.text(max_size=8), st.integers(0, 50))
def test_one_seed_is_one_sequence_of_which_shorter_draws_are_the_begin(
    made: tuple[LengthDistribution, Pair], seed: str, count: int
) -> None:
    lengths, nominal = made
    assert lengths.draw(nominal, count, seed) == lengths.draw(nominal, 50, seed)[:count]


@pytest.mark.parametrize("text", ["uniform:0.8-1.0", "lognormal:0.5", "lognormal:1,median", "lognormal:1,max=6000"])
def test_seeds_differ(text: str) -> None:
    lengths = parse_lengths(text)
    assert len({lengths.draw((5000, 250), 20, str(seed)) for seed in range(50)}) == 50


@settings(max_examples=40)
@given(distributions())
def test_the_mean_is_what_draws_come_to(made: tuple[LengthDistribution, Pair]) -> None:
    lengths, nominal = made
    drawn = lengths.draw(nominal, 3000, "a seed")
    for values, mean in zip(zip(*drawn, strict=True), lengths.mean(nominal), strict=True):
        # Six standard errors, and what the grid of a lognormal's mean leaves of its tail.
        assert abs(fmean(values) - mean) <= 6 * stdev(values) / math.sqrt(3000) + 0.01 * mean + 1e-9


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 1.5])
def test_a_lognormal_has_the_nominal_mean_or_median(sigma: float) -> None:
    inputs, outputs = Lognormal(sigma=sigma).mean((5000, 250))
    assert (inputs, outputs) == (pytest.approx(5000, rel=0.01), pytest.approx(250, rel=0.01))
    drawn = sorted(a for a, _ in Lognormal(sigma=sigma, nominal="median").draw((5000, 250), 4001, "x"))
    # The standard error of a median is 1.25 sigma / sqrt(n) in the logarithm.
    assert abs(math.log(drawn[2000] / 5000)) < 5 * 1.25 * sigma / math.sqrt(4001)
    logs = [math.log(value / 5000) for value in drawn]
    assert stdev(logs) == pytest.approx(sigma, rel=0.08)  # cut at 3 sigma, it is 1.3 % less


def test_uniform_lengths_reach_both_ends() -> None:
    drawn = parse_lengths("uniform:0.8-1.0").draw((20, 10), 400, "x")
    assert Counter(a for a, _ in drawn).keys() == {16, 17, 18, 19, 20}
    assert Counter(b for _, b in drawn).keys() == {8, 9, 10}


def test_lognormal_lengths_are_clipped_to_what_a_request_may_have() -> None:
    lengths = parse_lengths("lognormal:1,max=6000")
    drawn = lengths.draw((5000, 250), 500, "x")
    assert max(map(sum, drawn)) == sum(lengths.longest((5000, 250))) == 6000
    assert max(a for a, _ in parse_lengths("lognormal:1").draw((5000, 250), 500, "x")) > 6000


def test_every_pair_of_a_file_comes_once_before_any_comes_again(tmp_path: Path) -> None:
    lengths = read_pairs(file_of(tmp_path))
    drawn = lengths.draw((1, 1), 3 * len(PAIRS), "x")
    turns = [drawn[k : k + len(PAIRS)] for k in range(0, len(drawn), len(PAIRS))]
    assert all(Counter(turn) == Counter(PAIRS) for turn in turns)
    assert len(set(turns)) > 1


def test_a_large_file_is_drawn_from_without_a_shuffle_of_all_of_it() -> None:
    lengths = pairs_of(tuple((k + 1, 1) for k in range(300_000)))
    means = [fmean(a for a, _ in lengths.draw((1, 1), 100, str(seed))) for seed in range(40)]
    assert fmean(means) == pytest.approx(150_000, rel=0.05)


def test_forms_of_a_file_hold_the_same_lengths(tmp_path: Path) -> None:
    csv_file = read_pairs(file_of(tmp_path))
    lines = [{"extra": "x", "input_tokens": a, "output_tokens": b} for a, b in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2024-01-01,{a},{b}\n" for a, b in PAIRS
    ))  # fmt: skip
    for name in ("pairs.jsonl", "trace.csv"):
        other = read_pairs(tmp_path / name)
        assert other == csv_file and hash(other) == hash(csv_file) and other.pairs == PAIRS
        assert other.draw((1, 1), 12, "x") == csv_file.draw((1, 1), 12, "x")
    assert csv_file.mean_tokens == (fmean(a for a, _ in PAIRS), fmean(b for _, b in PAIRS))
    assert (csv_file.longest_request, csv_file.input_range) == ((8000, 1), (7, 8000))
    assert read_pairs(file_of(tmp_path, PAIRS[1:])) != csv_file


def test_stored_lengths_of_a_file_cannot_be_drawn_again(tmp_path: Path) -> None:
    lengths = read_pairs(file_of(tmp_path))
    kept = Pairs.model_validate_json(lengths.model_dump_json())
    assert kept == lengths and str(tmp_path) not in lengths.model_dump_json()
    with pytest.raises(UsageError, match=r"the lengths in pairs.csv are not kept with results.*file:pairs.csv"):
        kept.draw((1, 1), 1, "x")


@pytest.mark.parametrize(
    "text", ["fixed", "uniform:0.8-1.0", "uniform:0.25-3.0", "lognormal:0.5", "lognormal:2,median,max=9000"]
)
def test_written_lengths_read_back(text: str) -> None:
    lengths = parse_lengths(text)
    assert lengths.flag_value == text and parse_lengths(lengths.flag_value) == lengths


def test_labels() -> None:
    texts = ["fixed", "uniform:0.8-1", "lognormal:0.5", "lognormal:0.5,median,max=9000"]
    assert [parse_lengths(text).label for text in texts] == [
        "",
        "uniform 0.8-1.0",
        "lognormal 0.5",
        "lognormal 0.5 around the median up to 9000",
    ]


def test_the_refusal_of_no_distribution_has_the_forms() -> None:
    with pytest.raises(UsageError, match="is no distribution of lengths; give fixed, uniform:0"):
        parse_lengths("")


def test_a_file_may_stand_beside_the_one_that_names_it(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    assert relative_to_folder({"lengths": "file:pairs.csv"}, tmp_path) == {"lengths": f"file:{path}"}
    for other in ({"lengths": "file:other.csv"}, {"lengths": "uniform:0.8-1.0"}, {"lengths": 3}, {}, "text", None):
        assert relative_to_folder(other, tmp_path) == other


@pytest.mark.parametrize("text", ["uniform:1.0-1.0", "uniform:1-1"])
def test_lengths_from_once_to_once_the_nominal_ones_are_fixed(text: str) -> None:
    """So are their label and what they compare with."""
    assert parse_lengths(text) == parse_lengths("fixed")


def test_two_equal_shares_are_refused_as_such() -> None:
    with pytest.raises(UsageError, match="takes two different shares"):
        parse_lengths("uniform:0.8-0.8")
