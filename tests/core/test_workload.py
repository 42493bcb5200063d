"""SLOs as a command line gives them; the lengths of a workload's requests, and which are drawn for a level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pdlab.core.command_lines import flag_words
from pdlab.core.errors import UsageError
from pdlab.core.schema import validate
from pdlab.core.workload import Closed, Level, Load, Open, Slo, Workload, parse_slo


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft_ms=2000, tpot_ms=50", Slo(ttft_s=2.0, tpot_s=0.05)),
        ("e2el_ms=1.5", Slo(e2el_s=0.0015)),
        ("ttft_ms=1e-9", Slo(ttft_s=1e-12)),
        ("ttft_ms=2e3", Slo(ttft_s=2.0)),
    ],
)
def test_bounds(text: str, slo: Slo) -> None:
    assert parse_slo(text, 0.95) == slo


@pytest.mark.parametrize(
    "text", ["", "ttft_ms=0", "ttft_ms=-1", "ttft_ms=inf", "ttft=5", "ttft_ms=1.2.3", "ttft_ms=5;tpot_ms=5"]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no bound; expected ttft_ms=2000"):
        parse_slo(text, 0.95)


@pytest.mark.parametrize(
    ("text", "quantile", "words"), [("ttft_ms=1,ttft_ms=2", 0.95, "there twice"), ("ttft_ms=1", 1.0, "quantile")]
)
def test_bounds_that_are_refused(text: str, quantile: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_slo(text, quantile)


def level(load: Load | None = None, count: int = 40, **more: Any) -> Level:
    return Level(load=load or Closed(concurrency=4), num_requests=count, **{"seed": 1, **more})


def varied(**changes: Any) -> Workload:
    return Workload(**{"lengths": "uniform:0.8-1.0", **changes})


class TestDraw:
    def test_fixed_lengths_are_the_nominal_ones(self) -> None:
        assert Workload(input_tokens=7, output_tokens=3).draw(level(count=3)) == ((7, 3),) * 3

    @pytest.mark.parametrize("text", ["uniform:0.8-1.0", "lognormal:0.5"])
    def test_the_seed_of_the_prompts_changes_nothing(self, text: str) -> None:
        """A level that is measured again, or of another deployment, has new prompts of the same lengths."""
        workload = varied(lengths=text)
        assert workload.draw(level(seed=1)) == workload.draw(level(seed=99))
        assert workload.draw(level(count=10)) == workload.draw(level(count=40))[:10]

    @pytest.mark.parametrize(
        ("text", "drawn"),
        [
            ("uniform:0.8-1.0", ((4504, 231), (4014, 216), (4227, 248))),
            ("lognormal:0.5", ((6946, 205), (5825, 178), (3772, 138))),
        ],
    )
    def test_draws_stay_the_same(self, text: str, drawn: tuple[tuple[int, int], ...]) -> None:
        """Of kept results: a change here makes them unrepeatable."""
        assert varied(lengths=text).draw(level(Closed(concurrency=8), count=3)) == drawn

    @pytest.mark.parametrize(
        "load", [Closed(concurrency=160, per_gpu=2), Open(rate_rps=4), Open(rate_rps=4, burstiness=0.5)]
    )
    def test_every_load_has_the_same_sequence(self, load: Load) -> None:
        """Rates of a search differ by what is served of them, not by what was drawn for them."""
        assert varied().draw(level(load, count=160))[:40] == varied().draw(level(Closed(concurrency=4), count=40))

    def test_repeats_looks_and_experiments_differ(self) -> None:
        every = [
            varied().draw(level()),
            varied().draw(level(repeat=1)),
            varied().draw(level(look=1)),
            varied(seed=1).draw(level()),
            varied(lengths="uniform:0.7-1.0").draw(level()),
        ]
        assert len(set(every)) == len(every)

    def test_modes_send_what_they_are_for(self) -> None:
        mixed = varied().draw(level())
        assert varied(mode="prefill-only").draw(level()) == tuple((a, 1) for a, _ in mixed)
        assert varied(mode="decode-only").draw(level()) == mixed
        assert varied(mode="decode-approx").draw(level()) == tuple((1, b) for _, b in mixed)


class TestLengths:
    def test_results_without_the_field_are_of_fixed_lengths(self) -> None:
        old = {"input_tokens": 512, "output_tokens": 64, "mode": "mixed", "seed": 0, "shared_prefix_tokens": 0}
        assert Workload.model_validate(old) == Workload(input_tokens=512, output_tokens=64)
        assert not Workload.model_validate(old).varied

    def test_what_is_kept_reads_back_equal(self, tmp_path: Path) -> None:
        (tmp_path / "p.csv").write_text("input_tokens,output_tokens\n10,3\n30,4\n")
        for text in ("fixed", "uniform:0.8-1.0", "lognormal:0.5,max=9000", f"file:{tmp_path}/p.csv"):
            workload = Workload(lengths=text)  # type: ignore[arg-type]
            assert Workload.model_validate_json(workload.model_dump_json()) == workload

    def test_a_files_means_are_the_nominal_lengths(self, tmp_path: Path) -> None:
        path = tmp_path / "p.csv"
        path.write_text("input_tokens,output_tokens\n10,3\n30,5\n")
        workload = varied(lengths=f"file:{path}")
        assert (workload.input_tokens, workload.output_tokens, workload.longest) == (20, 4, (30, 5))
        assert workload.label.startswith("20:4 file p.csv ")
        assert flag_words("bench", **workload.bench_fields) == ("--lengths", f"file:{path}")
        with pytest.raises(ValidationError, match=r"input_tokens is 5000, but the file of lengths sets that itself"):
            varied(lengths=f"file:{path}", input_tokens=5000)

    def test_labels_tell_distributions_apart(self) -> None:
        assert Workload().label == "5000:250"
        assert varied().label == "5000:250 uniform 0.8-1.0"
        assert varied(mode="prefill-only").label == "5000:1 uniform 0.8-1.0"
        words = flag_words("bench", **varied().bench_fields)
        assert words == ("--itl", "5000", "--otl", "250", "--lengths", "uniform:0.8-1.0")

    def test_means_and_extremes_as_sent(self) -> None:
        workload = varied(lengths="uniform:0.5-1.5", mode="prefill-only")
        assert (workload.mean_tokens, workload.typical, workload.longest) == ((5000.0, 1.0), (5000, 1), (7500, 1))
        assert (workload.shortest_input, workload.longest_input) == (2500, 7500)
        assert varied(mode="decode-approx").longest == (1, 250)

    def test_a_prefix_must_fit_the_shortest_request(self) -> None:
        assert varied(shared_prefix_tokens=3999).declared_cached_share == 3999 / 4500
        with pytest.raises(ValidationError, match="the shortest request has 4000 input tokens"):
            varied(shared_prefix_tokens=4000)

    def test_a_limit_below_the_nominal_lengths_is_refused(self) -> None:
        with pytest.raises(ValidationError, match=r"at most 5249 tokens of a request are fewer than 5000 \+ 250"):
            varied(lengths="lognormal:0.5,max=5249")
        assert varied(lengths="lognormal:0.5,max=5250").longest == (5250 - 992, 992)

    def test_a_wrong_text_is_one_line_that_names_the_key(self) -> None:
        with pytest.raises(UsageError, match=r"^x: lengths: 'gauss:1' is no distribution of lengths; give fixed") as it:
            validate(Workload, {"lengths": "gauss:1"}, where="x")
        assert "\n" not in str(it.value)
