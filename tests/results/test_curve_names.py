"""Names of the curves of one folder: unique, short, and no longer than it takes to tell them apart."""

import pytest

from pdlab.results.curve_names import short_names

BARE = ("lengths",)


def curve(gpu: str, framework: str, tp: int, lengths: str = "1024:1024", **more: str) -> dict[str, str]:
    return {"num_gpus": str(tp), "gpu": gpu, "tp": str(tp), "framework": framework, "lengths": lengths, **more}


def names(*curves: dict[str, str]) -> list[str]:
    every = dict.fromkeys(key for each in curves for key in each)
    differing = [key for key in every if len({each.get(key) for each in curves}) > 1]
    return short_names(curves, differing, BARE)


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        # Only what differs, the common end of the GPUs' names left out, and no number of GPUs beside tp.
        (
            [curve("h100_sxm", "vllm", 4), curve("h200_sxm", "vllm", 8, "1024:8192")],
            ["h100 tp4, 1024:1024", "h200 tp8, 1024:8192"],
        ),
        ([curve("h100_sxm", "vllm", 4), curve("mi300x", "sglang", 4)], ["h100_sxm vllm", "mi300x sglang"]),
        # A version, where two curves have one name without it.
        (
            [
                curve("a", "vllm", 4, framework_version="1"),
                curve("a", "vllm", 4, framework_version="2"),
                curve("a", "sglang", 4, framework_version="9"),
            ],
            ["vllm 1", "vllm 2", "sglang"],
        ),
        ([curve("a", "v", 4), {**curve("a", "v", 4), "num_gpus": "1"}], ["4 GPUs", "1 GPU"]),
        ([curve("a", "v", 4, graph="on"), curve("a", "v", 4)], ["graph=on", "no graph"]),
        ([curve("a", "v", 4, framework_version="1"), curve("a", "v", 4)], ["1", "no version"]),
    ],
)
def test_names(curves: list[dict[str, str]], expected: list[str]) -> None:
    assert names(*curves) == expected


def test_every_two_of_many_have_different_names() -> None:
    every = [
        curve(gpu, framework, tp, lengths, framework_version=version, dp_attention=attention)
        for gpu in ("h100_sxm", "h200_sxm")
        for framework in ("vllm", "trtllm")
        for tp in (1, 2)
        for lengths in ("1:1", "8:1")
        for version in ("0.1", "0.2")
        for attention in ("1", "4")
    ]
    assert len(set(names(*every))) == len(every) == 64
    assert max(map(len, names(*every))) < 45
