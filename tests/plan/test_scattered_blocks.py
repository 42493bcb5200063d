"""What a KV-transfer check measured of scattered blocks decides what the plan guesses without it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pdlab.cli import plan as cli_plan
from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Disaggregated, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.settings import parse
from pdlab.plan.scattered_blocks import ScatteredBlocks, check_line, read
from pdlab.sim.hardware import load_hardware
from pdlab.sim.kv_transfer import transfer_costs, with_scattered_blocks
from pdlab.transfer.options import CheckTransferSettings, plan_from

MODEL = "gpt-oss-120b"
SHAPE = require_shape(MODEL)


def size(tokens: int | None, scattered_s: float, contiguous_s: float | None) -> dict[str, Any]:
    return {
        "size": {"blocks": 7 if tokens is None else -(-tokens // 16) + min(9, -(-tokens // 16)), "tokens": tokens},
        "seconds": [scattered_s, 9.0, scattered_s],
        "contiguous_s": [] if contiguous_s is None else [contiguous_s, contiguous_s, 9.0],
    }


FILE: dict[str, Any] = {
    "kind": "kv-transfer-check",
    "plan": {
        "strategy": "pack", "prefill_tp": 2, "decode_tp": 2, "compare": True, "concurrent": 2,
        "shape": {"name": MODEL, "regions": 18, "block_tokens": 16},
    },
    "runs": [
        {"backend": "LIBFABRIC", "error": {"kind": "backend", "text": "cannot start"}, "exit_code": 5},
        {
            "backend": "UCX", "vram": True, "exit_code": 0, "verdict": {"text": "OK: pack"},
            "sizes": [size(1000, 0.002, 0.001), size(5000, 0.4, 0.01), size(None, 1.0, 1.0)],
        },
    ],
}  # fmt: skip


def write(path: Path, change: Callable[[dict[str, Any]], object] = lambda data: None) -> Path:
    data = copy.deepcopy(FILE)
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_the_size_nearest_to_the_prompt_of_the_backend_that_passed(tmp_path: Path) -> None:
    blocks = read(write(tmp_path / "b.json"), SHAPE, 4000, cpu=False, hybrid=True)
    assert (blocks.tokens, blocks.scattered_s, blocks.contiguous_s) == (5000, 0.2, 0.005), "two requests at a time"
    assert blocks.extra_s_per_token == pytest.approx(0.195 / 5000)
    assert "UCX" in blocks.source
    assert read(tmp_path / "b.json", SHAPE, 1500, cpu=False, hybrid=True).tokens == 1000


def stall_s(blocks: ScatteredBlocks, *, hybrid: bool) -> float:
    """Of the decode engine for a prompt of 5000 tokens, beyond that of blocks that merge."""
    hardware = load_hardware("h100-vllm-0.11").model_copy(update={"hybrid_kv": hybrid})
    topology = parse_label("pd-pack-p1xtp2-d1xtp2")
    assert isinstance(topology, Disaggregated)
    made = with_scattered_blocks(hardware, SHAPE, blocks.extra_s_per_token)
    costs = transfer_costs(made, SHAPE, topology, "nvlink")
    assert costs.depend_on_age == (costs.stall_s_per_token > costs.post_s_per_token)
    return 5000 * (costs.stall_s_per_token - costs.post_s_per_token)


def test_what_takes_longer_is_what_the_decode_engine_stands_still(tmp_path: Path) -> None:
    blocks = read(write(tmp_path / "b.json"), SHAPE, 5000, cpu=False, hybrid=True)
    assert stall_s(blocks, hybrid=True) == pytest.approx(0.195)
    change = write(tmp_path / "c.json", lambda data: data["runs"][1].update(sizes=[size(5000, 0.01, 0.011)]))
    faster = read(change, SHAPE, 5000, cpu=False, hybrid=True)
    assert stall_s(faster, hybrid=True) == 0, "no slower: pools may wrap"


def test_engines_that_keep_every_block_of_every_layer_move_more_pages_than_the_check(tmp_path: Path) -> None:
    """9 us for each of 322 blocks in 18 regions; the planned engine has 313 blocks in 36 layers."""
    extra_s = 9e-6 * 322 * 18
    change = write(
        tmp_path / "c.json", lambda data: data["runs"][1].update(sizes=[size(5000, 0.02 + 2 * extra_s, 0.02)])
    )
    all_blocks, windows = (read(change, SHAPE, 5000, cpu=False, hybrid=hybrid) for hybrid in (False, True))
    assert stall_s(all_blocks, hybrid=False) == pytest.approx(9e-6 * 313 * 36)
    assert stall_s(windows, hybrid=True) == pytest.approx(extra_s)


def test_a_latent_cache_is_measured_by_the_check_that_a_refusal_names(tmp_path: Path) -> None:
    latent = require_shape("deepseek-v3")
    with pytest.raises(UsageError) as refused:
        read(write(tmp_path / "b.json"), latent, 5000, cpu=False, hybrid=False)
    _, _, flags = str(refused.value).partition("; check with ")

    def of_a_check(words: list[str]) -> Path:
        plan = plan_from(parse(CheckTransferSettings, ["--compare-blocks", *words]))
        return write(
            tmp_path / "c.json", lambda data: data["plan"].update(asdict(plan), shape=asdict(plan.shape), concurrent=2)
        )

    printed = check_line(latent).partition("test_nixl_connector_ray.py")[2].split()
    assert of_a_check(printed).read_text() == of_a_check(flags.split()).read_text()
    blocks = read(of_a_check(flags.split()), latent, 5000, cpu=False, hybrid=False)
    assert blocks.extra_s_per_token == pytest.approx(0.195 / 5000 * 313 / 322), "313 blocks in place of FILE's 322"
    with pytest.raises(UsageError, match="is of 61x18432"):  # two ranks with half of the latent each
        read(of_a_check([*flags.split()[:4], "--prefill-tp", "2", "--decode-tp", "2"]), latent, 5000, cpu=False,
             hybrid=False)  # fmt: skip


def test_a_plan_takes_it_in_place_of_its_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def goodput(*words: str) -> tuple[float, str]:
        flags = ["--gpus", "2", "--placement", "pack", "--slo-tpot-ms", "12", "--concurrency", "8"]
        assert cli_plan.main([*flags, *words]) == 0
        printed = capsys.readouterr().out
        rows = [line.split() for line in printed.splitlines() if line.split()[1:2] == ["pd-pack-p1xtp1-d1xtp1"]]
        rows += [line.split() for line in printed.splitlines() if line.split()[1:2] == ["pd-pack-p1xtp1-d1xtp1~"]]
        return float(rows[0][6]), printed

    slow, printed = goodput("--blocks", str(write(tmp_path / "slow.json")))
    assert "times 1.94: the planned engines keep all blocks of all layers" in printed, "vLLM 0.11"
    assert "40 times" in printed and "~" not in printed and "--assume-merged" not in printed
    same = write(tmp_path / "same.json", lambda data: data["runs"][1].update(sizes=[size(5000, 0.01, 0.01)]))
    fast, printed = goodput("--blocks", str(same))
    merged, guessed = goodput("--assume-merged")
    assert fast == merged > 1.2 * slow
    assert "--blocks blocks.json" in guessed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(kind="x"), "not the --json of a KV-transfer check"),
        (lambda data: data["plan"].update(compare=False), "--compare-blocks"),
        (lambda data: data["plan"].update(strategy="spread"), "check --strategy pack"),
        (lambda data: data["plan"].update(decode_tp=4), "TP 2 to 4"),
        (lambda data: data["plan"]["shape"].update(name="tiny"), f"is of tiny, the plan of {MODEL}"),
        (lambda data: data["runs"][1].update(exit_code=3), "did not pass (cannot start; OK: pack)"),
        (lambda data: data["runs"][1].update(vram=False), "memory of the host, the plan is of GPUs"),
        (lambda data: data["runs"][1].update(sizes=[size(None, 1.0, 1.0)]), "check with --tokens 5000"),
        (lambda data: data["runs"][1].pop("sizes"), "missing or damaged"),
        (lambda data: data["runs"][1].update(sizes=[size(5000, 0.0, 1.0)]), "missing or damaged"),
        (lambda data: data.update(runs=7), "missing or damaged"),
    ],
)
def test_a_file_that_does_not_tell_is_one_line(
    change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_plan.main(["--blocks", str(write(tmp_path / "b.json", change))]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "none.json", SHAPE, 5000, cpu=False, hybrid=True)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        read(tmp_path / "x.json", SHAPE, 5000, cpu=False, hybrid=True)


def test_blocks_of_the_same_cache_count_whatever_the_models_name_is(tmp_path: Path) -> None:
    """A block of 16 tokens of 8 heads of 64 values, K and V in two bytes; windows halve the tensors."""
    cache = {"name": "prod", "layers": 36, "regions": 18, "kv_heads": 8, "block_tokens": 16, "head_bytes": 4096}
    own = write(tmp_path / "own.json", lambda data: data["plan"].update(shape=cache))
    assert read(own, SHAPE, 5000, cpu=False, hybrid=True).tokens == 5000
    for change in ({"layers": 24}, {"regions": 36}, {"head_bytes": 8192}):
        other = write(tmp_path / "o.json", lambda data, change=change: data["plan"].update(shape={**cache, **change}))
        with pytest.raises(UsageError, match="is of prod, the plan of gpt-oss-120b"):
            read(other, SHAPE, 5000, cpu=False, hybrid=True)
