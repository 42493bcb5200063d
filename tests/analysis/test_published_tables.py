"""Notations of others and their tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.analysis import published_tables
from pdlab.analysis.view import View
from pdlab.core import notation
from pdlab.core.deployment import Collocated, Disaggregated
from pdlab.core.errors import StoreError, UsageError


@pytest.mark.parametrize(
    ("text", "label", "gpus"),
    [
        ("P4D9", "pd-spread-p1xdp32ep-d1xdp72ep", (32, 72)),
        ("P4D6", "pd-spread-p1xdp32ep-d1xdp48ep", (32, 48)),
        ("(P3x3)D4", "pd-spread-p3xdp24ep-d1xdp32ep", (72, 32)),
        ("P3x3D4", "pd-spread-p3xdp24ep-d1xdp32ep", (72, 32)),
        ("(P4x2)(D9x2)", "pd-spread-p2xdp32ep-d2xdp72ep", (64, 144)),
        ("1xtp2-3xtp2", "pd-spread-p1xtp2-d3xtp2", (2, 6)),
        ("p1xTP4-d1xTP4", "pd-spread-p1xtp4-d1xtp4", (4, 4)),
        ("pd-pack-p2xtp1-d1xtp2", "pd-pack-p2xtp1-d1xtp2", (2, 2)),
    ],
)
def test_notations(text: str, label: str, gpus: tuple[int, int]) -> None:
    deployment = notation.parse(text)
    assert isinstance(deployment, Disaggregated)
    assert (deployment.label, (deployment.prefill.gpus, deployment.decode.gpus)) == (label, gpus)


def test_collocated_and_other_nodes() -> None:
    assert isinstance(notation.parse("4xTP2"), Collocated)
    assert notation.parse("P2D1", gpus_per_node=4, tp=4).label == "pd-spread-p1xtp4dp2ep-d1xtp4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected P4D9"),
        ("P0D4", "expected P4D9"),
        ("(P3x3D4", "expected P4D9"),
        ("P4", "expected P4D9"),
        ("3P1D", "counts instances without their size; write the pools out, for example 3xtp4-1xtp4"),
        ("1xtp2-3xqq", "pool '3xqq'"),
    ],
)
def test_no_notation(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        notation.parse(text)
    assert message in str(error.value)


@given(st.tuples(*[st.integers(1, 20)] * 4), st.sampled_from([1, 2, 4, 8]), st.sampled_from([4, 8]))
def test_nodes(numbers: tuple[int, int, int, int], tp: int, per_node: int) -> None:
    p_nodes, p_groups, d_nodes, d_groups = numbers
    if tp > per_node:
        tp = per_node
    text = "".join(
        f"{letter}{nodes}" if groups == 1 else f"({letter}{nodes}x{groups})"
        for letter, nodes, groups in (("P", p_nodes, p_groups), ("D", d_nodes, d_groups))
    )
    deployment = notation.parse(text, gpus_per_node=per_node, tp=tp)
    assert isinstance(deployment, Disaggregated)
    assert [(pool.replicas, pool.gpus_per_replica) for pool in (deployment.prefill, deployment.decode)] == [
        (p_groups, p_nodes * per_node),
        (d_groups, d_nodes * per_node),
    ]
    assert deployment.prefill.gpus == p_nodes * p_groups * per_node
    assert deployment.decode.gpus == d_nodes * d_groups * per_node


HEAD = "source,configuration,input_tokens,output_tokens,concurrency"


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_per_role_and_node(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "# figures made up for this test",
        f"{HEAD},per,input_tokens_per_s,output_tokens_per_s,ttft_p95_s,tpot_mean_ms",
        'report,P4D9,2000,100,1024,role-node,"50,000",20000,1.5,40',
        "report,P4D9,2000,100,512,role-node,40000,15000,0.9,30",
        "report,4xtp2,2000,100,64,gpu,100,10,,",
    )
    pd, collocated = published_tables.load(path)
    assert pd.label == "P4D9, report" and pd.published == "report"
    low, high = pd.points
    assert (low.value, high.value) == (512, 1024)
    assert high.input_tokens_per_s == 50_000 * 4 and high.output_tokens_per_s == 20_000 * 9
    assert high.requests_per_s == pytest.approx(20_000 * 9 / 100)
    assert (high.ms("ttft", "p95"), high.ms("tpot", "mean"), high.ms("tpot", "p50")) == (1500, 40, None)
    # Back to what was published: per prefill node and per decode node.
    per_prefill = View(role="prefill", throughput_metric="input")
    assert pd.throughput(high, per_prefill) == pytest.approx(50_000)
    assert pd.throughput(high, View(role="decode")) == pytest.approx(20_000)
    assert collocated.points[0].output_tokens_per_s == 80
    assert collocated.points[0].latency_ms == {}


@given(
    st.sampled_from(["deployment", "gpu", "node"]),
    st.floats(1, 1e6),
    st.integers(1, 5000),
    st.integers(1, 5000),
)
def test_one_rate_gives_the_others(per: str, rate: float, input_tokens: int, output_tokens: int) -> None:
    row = {
        "source": "s",
        "configuration": "P1D1",
        "input_tokens": str(input_tokens),
        "output_tokens": str(output_tokens),
        "rate_rps": "2.5",
        "per": per,
        "output_tokens_per_s": repr(rate),
    }
    _, point = published_tables._point("here", row)
    factor = {"deployment": 1, "gpu": 16, "node": 2}[per]
    assert point.output_tokens_per_s == pytest.approx(rate * factor)
    assert point.requests_per_s * output_tokens == pytest.approx(point.output_tokens_per_s)
    assert point.input_tokens_per_s == pytest.approx(point.requests_per_s * input_tokens)
    assert (point.kind, point.value) == ("rate", 2.5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no table"),
        (["# only a comment"], "has no table"),
        ([f"{HEAD},speed", "a,P1D1,1,1,1,5"], "column 'speed' is not known"),
        ([f"{HEAD},concurrency", "a,P1D1,1,1,1,5"], "column 'concurrency' occurs twice"),
        (["source,configuration", "a,P1D1"], "column 'input_tokens' is missing"),
        ([f"{HEAD},requests_per_s", "a,P1D1,1,1,1"], "line 2: 5 cells for 6 columns"),
        ([f"{HEAD},requests_per_s", ",P1D1,1,1,1,5"], "line 2: source is empty"),
        ([f"{HEAD},requests_per_s", "a,P1D1,1,1,1,fast"], "requests_per_s is 'fast'; expected a number above 0"),
        ([f"{HEAD},requests_per_s", "a,P1D1,1.5,1,1,5"], "input_tokens is '1.5'; expected a whole number"),
        ([f"{HEAD},requests_per_s", "a,P1D1,1,1,,5"], "either concurrency or rate_rps"),
        ([f"{HEAD},requests_per_s", "a,what,1,1,1,5"], "line 2: configuration 'what'"),
        ([f"{HEAD},ttft_p50_s", "a,P1D1,1,1,1,5"], "no rate"),
        ([f"{HEAD},requests_per_s,per", "a,P1D1,1,1,1,5,rack"], "per is 'rack'"),
        ([f"{HEAD},input_tokens_per_s,per", "a,4xtp2,1,1,1,5,role-gpu"], "needs a prefill-decode configuration"),
        ([f"{HEAD},requests_per_s,per", "a,P1D1,1,1,1,5,role-gpu"], "requests_per_s has no role"),
        (
            [f"{HEAD},requests_per_s", "a,P1D1,1,1,1,5", "", "a,P1D1,1,1,1,6"],
            "line 4: P1D1 at this load is given twice",
        ),
    ],
)
def test_bad_tables(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        published_tables.load(table(tmp_path, *lines))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        published_tables.load(tmp_path / "nothing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StoreError, match="not UTF-8"):
        published_tables.load(tmp_path / "binary.csv")
