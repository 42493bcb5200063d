"""The command line of the KV-transfer check: bad input, plans, report, JSON and plot."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pdlab.core.catalog import load_model, require_shape
from pdlab.core.errors import TransferError, UsageError
from pdlab.core.findings import found
from pdlab.core.settings import parse
from pdlab.remote.network import Interface, RankHost
from pdlab.report import paper
from pdlab.report.transfer_plot import figure as transfer_figure
from pdlab.transfer.check import BackendResult, SizeResult, worst_code
from pdlab.transfer.options import CheckTransferSettings, kv_shape, plan_from
from pdlab.transfer.plan import RequestSize, TransferPlan
from pdlab.transfer.rank.codes import Inspection
from pdlab.transfer.report import as_json, for_pd, render, result_json
from pdlab.transfer.ucx_log import UcxLane, Wire
from pdlab.transfer.verdict import Verdict


def parsed(*words: str) -> TransferPlan:
    return plan_from(parse(CheckTransferSettings, words))


def test_the_default_is_the_model_that_people_serve() -> None:
    plan = parsed()
    assert (plan.strategy, plan.shape.name, plan.backends, plan.direction) == ("pack", "gpt-oss-120b", ("UCX",), "read")
    assert [size.tokens for size in plan.sizes] == [1000, 5000, 20000]
    assert plan.sizes[1] == RequestSize(322, 5000) and plan.repeats == 5
    assert plan.num_blocks > 1259


def test_a_shape_without_a_model() -> None:
    plan = parsed("--num-layers", "3", "--block-len-bytes", "65536", "--blocks", "8,2,8", "--prefill-tp", "2",
                  "--num-blocks", "40", "--concurrent-requests", "4", "--random-blocks", "--seed", "7")  # fmt: skip
    assert (
        plan.sizes == (RequestSize(2), RequestSize(8)) and plan.num_blocks == 40 and plan.scattered and plan.seed == 7
    )
    assert plan.shape.regions == 3 and plan.shape.page_bytes(1) == 65536 and plan.shape.page_bytes(2) == 32768


def test_an_unknown_dtype_is_refused() -> None:
    model = load_model("gpt-oss-120b")
    assert model is not None
    with pytest.raises(UsageError, match="int3"):
        kv_shape(model.model_copy(update={"kv_dtype": "int3"}))


@pytest.mark.parametrize("block_tokens", [16, 128])
def test_the_shape_in_place_of_a_latent_cache_moves_as_much_as_one_rank_reads(block_tokens: int) -> None:
    """Each rank reads the whole latent: 61 layers x 576 values of 2 bytes per token, 5,008 tokens in whole blocks."""
    model = require_shape("deepseek-v3").model_copy(update={"kv_block_tokens": block_tokens})
    with pytest.raises(UsageError) as refused:
        kv_shape(model)
    advised = re.search(r"(--num-layers .*) in place of --model", str(refused.value))
    assert advised is not None
    plan = parsed(*advised[1].split(), "--tokens", "5000")
    assert plan.shape.request_bytes(plan.sizes[0].blocks, plan.decode_tp) == 61 * 576 * 2 * 5008


def result(gb_per_s: float = 10.0) -> BackendResult:
    wire = Wire("zero-copy", (UcxLane("srd", "rdmap79s0:1"),), True, 5000)
    shape = parsed().shape
    sizes = []
    for size in parsed().sizes:
        moved = shape.request_bytes(size.blocks, 1)
        took = moved / gb_per_s / 1e9
        sizes.append(
            SizeResult(size, moved, took * 5, (took * 2, took, took, took, took / 2), (took,) * 5, 900, 300, 0.1)
        )
    hosts = {
        side: RankHost(side, "10.0.0.1", 1, side, side, (Interface("rdmap79s0", "efa", 100.0),))
        for side in ("prefill", "decode")
    }
    verdict = Verdict(
        0, "OK: spread over srd", "srd/rdmap79s0:1", "zero-copy", "srd", 0.8, "1 rail (12.5 GB/s)", ceiling="rails"
    )
    return BackendResult(
        "UCX", hosts, 1.0, 0.01, 0.2, tuple(sizes), verdict, (found("no_protocol_table"),), (Inspection(100, 10),), 880,
        0.1, 0.001, 20.0, None, "why not", None, wire, {"rdmap79s0": 1.0}, 1000, "1.21.0", {}, ("/lib/libucp.so",),
        None, "| row |",
    )  # fmt: skip


def test_what_it_means_for_pd() -> None:
    """By hand: 322 blocks x 18 regions x 32 KiB = 189,923,328 bytes; at 10 GB/s 18.99 ms and 52.65 prompts/s."""
    prediction = for_pd(result(), parsed().shape, 1)
    assert prediction is not None
    assert prediction.bytes == prediction.measured_bytes == 189_923_328
    assert prediction.added_ttft_s == pytest.approx(0.0189923328)
    assert prediction.saturates_at_rps == pytest.approx(1 / 0.0189923328)


@pytest.mark.parametrize("decode_tp", [1, 8, 16])
def test_a_prompt_takes_as_long_as_its_transfer_took(decode_tp: int) -> None:
    """With 16 ranks for 8 heads each head moves twice, and a measured rate counts both copies."""
    shape = parsed().shape
    heads_moved = max(8, decode_tp)
    moved = 322 * 18 * 4096 * heads_moved
    measured = SizeResult(RequestSize(322, 5000), moved, 0.01, (0.01,) * 5, (0.01,) * 5, 900, 300, 0.1)
    prediction = for_pd(replace(result(), sizes=(measured,)), shape, decode_tp)
    assert prediction is not None and prediction.bytes == moved
    assert prediction.added_ttft_s == pytest.approx(0.01)


def test_nothing_is_predicted_without_a_ground() -> None:
    plan, (small, *large) = parsed(), result().sizes
    little = replace(result(), sizes=(small,))
    assert "for PD: nothing predicted: no transfer of at least 64 MB was measured" in render(
        plan, little, plan.shape, verbose=False
    )
    assert result_json(plan, little, plan.shape)["for_pd"] is None
    slow_start = replace(result(), sizes=(replace(small, seconds=tuple(s * 100 for s in small.seconds)), *large))
    tiny = replace(plan.shape, regions=1)  # its prompt is nearest to the small size, which is not judged
    prediction = for_pd(slow_start, tiny, 1)
    assert prediction is not None and prediction.gb_per_s == pytest.approx(10.0)
    odd = parsed("--num-layers", "3", "--block-len-bytes", "9216", "--prefill-tp", "3", "--decode-tp", "3")
    text = render(odd, result(), plan.shape, verbose=False)
    assert "for PD: nothing predicted: decode TP 3 and 8 KV heads: one must divide the other" in text


def test_the_report_says_everything() -> None:
    shown = replace(result(), ray_s=4.0, startup_s=2.04, checked_bytes=2**31, check_s=0.5)
    text = render(parsed("--strategy", "spread"), shown, parsed().shape, verbose=True)
    for words in (
        "5000", "189.9", "5-20", "memcpy of the same pages, one thread, 20 GB/s",
        "raw UCX not measured (why not)", "1 rail (12.5 GB/s) 80% reached", "every word exact", "5000 operations",
        "rdmap79s0 100%", "19.0 ms more TTFT", "52.7 such requests/s", "note: UCX printed no table of protocols",
        "/lib/libucp.so", "UCX | | row |",
        "took: start-up 2.0 s beside 4.0 s of Ray's; checks 0.5 s",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert text.splitlines()[-1] == "OK: spread over srd"


def test_scattered_blocks_beside_one_run_of_them() -> None:
    plan = parsed("--compare-blocks")
    assert plan.scattered and plan.compare and plan.requests == 2 * parsed("--random-blocks").requests
    compared = replace(result(), sizes=tuple(replace(s, contiguous_s=s.seconds[:2]) for s in result().sizes))
    assert compared.sizes[1].scattered_over_contiguous == pytest.approx(1 / 1.5), "median of 2 and 1 times"
    text = render(plan, compared, plan.shape, verbose=False)
    assert "scattered blocks take, against one run of them: 1000 tokens 0.67 times (" in text
    assert "5000 tokens 0.67 times (18.99 against 28.49 ms)" in text
    assert "against one run" not in render(plan, result(), plan.shape, verbose=False)
    assert result_json(plan, compared, plan.shape)["sizes"][0]["scattered_over_contiguous"] == pytest.approx(2 / 3)


def test_json_holds_every_repeat_and_says_what_is_predicted() -> None:
    plan = parsed()
    data = json.loads(json.dumps(as_json(plan, [result_json(plan, result(), plan.shape)], {"versions": {}})))
    run = data["runs"][0]
    assert data["schema_version"] == 1 and data["plan"]["shape"]["name"] == "gpt-oss-120b"
    assert len(run["sizes"][2]["seconds"]) == 5 and run["sizes"][2]["gb_per_s"] == pytest.approx(10.0)
    assert run["sizes"][0]["gb_per_s_slowest"] == pytest.approx(5.0) and run["for_pd"]["origin"] == "predicted"
    assert run["raw_gb_per_s"] is None and run["memcpy_gb_per_s"] == 20.0
    assert (run["startup_s"], run["check_s"], run["checked_bytes"], run["ray_s"]) == (1.0, 0.1, 880, None)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_plot_is_drawn(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plot.{suffix}"
    paper.draw(transfer_figure(parsed(), [result(), replace(result(5.0), backend="LIBFABRIC", wire=None)]), path)
    assert path.stat().st_size > 5000
    if suffix == "svg":
        assert path.read_text().count("<path") > 20


def test_the_worst_of_several_backends_is_the_exit_code() -> None:
    assert [worst_code(codes) for codes in ([0, 0], [0, 3], [3, 5], [5, 4], [0, 4, 3])] == [0, 3, 5, 4, 4]
    assert TransferError("peer", "x").exit_code == 5
