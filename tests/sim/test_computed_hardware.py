"""Hardware that nothing was measured on: which file or table a word means, and the host's time by engine version."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.model_folders import GPT_OSS_120B, model_folder

from pdlab.core.catalog import known_gpus, require_shape
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.files import CONFIGS
from pdlab.core.model_size import kv_bytes_per_token_layer
from pdlab.core.version import STACK
from pdlab.core.workload import Closed, Level, Workload
from pdlab.deploy.engine_memory import engine_memory
from pdlab.plan.step_findings import step_findings
from pdlab.sim import aic
from pdlab.sim.computed_hardware import (
    as_served,
    beside,
    computed,
    computed_gpus,
    hardware_of,
)
from pdlab.sim.engine_host import DirectRouting, EngineHost, HostTime, host_of
from pdlab.sim.hardware import Speculation, digest_of, load_hardware
from pdlab.sim.kv_transfer import transfer_costs
from pdlab.sim.level import figures
from pdlab.sim.simulator import simulate
from pdlab.sim.step_source import BilinearTable, Limits, LinearTable, Tabulated
from pdlab.sim.step_time import kv_capacity_tokens, kv_pool_bytes
from pdlab.sim.steps import Speculative, steps_of

GPT_OSS = require_shape("gpt-oss-120b")
TP4 = Pool(tp=4)
HOSTS = EngineHost(
    engine="vllm",
    direct=DirectRouting(source="d"),
    versions={
        "0.11": HostTime(step_ms=2.0, sd_ms=0.3, source="a"),
        "0.18": HostTime(step_ms=0.5, sd_ms=0.4, source="b"),
        "0.20": HostTime(step_ms=0.8, sd_ms=0.1, source="c"),
    },
)


def constant_tables(decode_s: float, prefill_s_per_token: float = 1e-6) -> Tabulated:
    """A decode step of always the same time."""
    xs, ys = (1.0, 1024.0), (1.0, 131_072.0)
    flat, nothing = ((decode_s, decode_s), (decode_s, decode_s)), ((0.0, 0.0), (0.0, 0.0))
    ends = (2.0, 9216.0)
    return Tabulated(
        shared=LinearTable(xs=ends, ys=tuple(decode_s + prefill_s_per_token * x for x in ends)),
        decode=BilinearTable(xs=xs, ys=ys, z=flat),
        generation_attention=BilinearTable(xs=xs, ys=ys, z=nothing),
        context_attention=BilinearTable(xs=(16.0, 8192.0), ys=(0.0, 131_072.0), z=nothing),
        limits=Limits(tokens=9216, batch=1024, context=131_072, prefill_tokens=8192, prefix=131_072),
        provenance="made by hand",
    )


@pytest.fixture
def ten_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aic, "tabulate", lambda *_: constant_tables(10e-3))


@pytest.mark.parametrize(
    ("engine", "version", "label", "arguments", "layers"),
    # Layers of 36 that keep every token: the other 18 of gpt-oss-120b have a window.
    [
        ("vllm", "0.24", "collocated-1xtp4", {}, 18),
        ("vllm", "0.24", "pd-spread-p1xtp4-d1xtp4", {}, 18),
        ("vllm", "0.18", "collocated-1xtp4", {}, 18),
        ("vllm", "0.18", "pd-spread-p1xtp4-d1xtp4", {}, 36),
        ("vllm", "0.18", "pd-fluid-2xtp4", {}, 36),
        ("vllm", "0.24", "collocated-1xtp4", {"disable_hybrid_kv_cache_manager": True}, 36),
        ("vllm", "0.24", "pd-spread-p1xtp4-d1xtp4", {"disable_hybrid_kv_cache_manager": True}, 36),
        ("sglang", None, "collocated-1xtp4", {}, 36),
    ],
)
def test_windowed_layers_keep_what_the_version_keeps(
    engine: str, version: str | None, label: str, arguments: dict[str, object], layers: int
) -> None:
    deployment = Deployment(topology=parse_label(label), engine_kwargs=arguments)
    hardware = computed("H200", engine, version).serving(deployment)
    pool = deployment.with_engine_kwargs({}).pools.get("decode") or next(
        iter(deployment.with_engine_kwargs({}).pools.values())
    )
    token_bytes = layers * 2 * 8 * 64 * 2
    assert kv_capacity_tokens(hardware, GPT_OSS, pool) == pytest.approx(
        kv_pool_bytes(hardware, GPT_OSS, pool) / token_bytes, rel=1e-3
    )
    topology = deployment.with_engine_kwargs({}).topology
    if isinstance(topology, Disaggregated):
        costs = transfer_costs(hardware, GPT_OSS, topology, "srd")
        assert costs.bytes_per_token == pytest.approx(token_bytes, rel=1e-3)
        assert costs.post_s_per_token == pytest.approx(1e-6 * hardware.value("post_us") * 2 * layers / 16)


def test_a_fit_keeps_the_windows_of_its_runs() -> None:
    home = load_hardware("h100-vllm-0.11")
    for label in ("collocated-1xtp4", "pd-spread-p1xtp4-d1xtp4"):
        assert home.serving(Deployment(topology=parse_label(label))) == home


def test_a_gpu_type_has_its_memory_and_the_rest_as_at_home() -> None:
    hardware = computed("h200", "vllm", "0.29")
    assert (hardware.name, hardware.gpu_type, hardware.gpus_per_node) == ("h200-vllm-0.29-tables", "H200", 8)
    assert hardware.steps is not None
    assert (hardware.steps.system, hardware.steps.version) == ("h200_sxm", "0.24.0")
    assert hardware.value("memory_gb") == known_gpus()["H200"].memory_gb[0]
    home = load_hardware("h100-vllm-0.11")
    assert hardware.value("overhead_ms") == home.value("overhead_ms")
    assert {hardware.constants[name].basis for name in ("overhead_ms", "routers")} == {"assumed"}
    more = 4 * (0.92 * hardware.value("memory_gb") - 0.9 * home.value("memory_gb")) * 1e9
    grown = kv_pool_bytes(hardware, GPT_OSS, TP4) - kv_pool_bytes(home, GPT_OSS, TP4)
    assert grown == pytest.approx(more, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "version", "share"),
    [
        *(("vllm", "0.11", 0.9), ("vllm", "0.19", 0.9), ("vllm", "0.20", 0.92), ("vllm", "0.29", 0.92)),
        *(("vllm", "1.0", 0.92), ("sglang", None, 0.9), ("trtllm", None, 0.9)),
    ],
)
def test_the_share_of_the_memory_is_that_of_the_version(engine: str, version: str | None, share: float) -> None:
    hardware = computed("H200", engine, version)
    assert hardware.value("memory_utilization") == share
    assert hardware.of(Pool(engine_kwargs={"gpu_memory_utilization": 0.85})).value("memory_utilization") == 0.85


@pytest.mark.parametrize("model", ["gpt-oss-120b", "gpt-oss-20b"])
def test_a_plan_of_the_stack_has_the_kv_cache_of_a_launch(model: str) -> None:
    shape, deployment = require_shape(model), Deployment(topology=Collocated(pool=TP4), model=model)
    hardware = computed("H200", "vllm", STACK["vllm"].rpartition(".")[0])
    memory = engine_memory(deployment, "collocated", shape, hardware.value("memory_gb"), cpu=False, workload=Workload())
    assert memory is not None
    assert kv_pool_bytes(hardware, shape, TP4) == pytest.approx(4 * memory.kv_bytes, rel=1e-3)


def test_tables_have_no_name_of_a_fit() -> None:
    fits = {path.stem for path in (CONFIGS / "catalog").glob("*.yaml")}
    assert "h100-vllm-0.11" in fits and computed("H100", "vllm", "0.11").name not in fits


def test_every_gpu_type_with_tables_can_be_computed() -> None:
    assert {"A100-80G", "B200", "B300", "GB200", "GB300", "H100", "H200", "L40S", "RTX-PRO-6000"} <= set(
        computed_gpus()
    )
    for name in computed_gpus():
        for engine in ("vllm", "sglang", "trtllm"):
            assert computed(name, engine).steps is not None


def test_a_type_without_tables_is_refused() -> None:
    with pytest.raises(UsageError, match=r"GPU type A100: .*A100-80G"):
        computed("A100")


def test_fitted_constants_come_first_where_the_fit_is_of_what_is_asked() -> None:
    for name in ("gpt-oss-120b", "openai/gpt-oss-120b"):
        assert hardware_of("H100", name, "vllm", "0.11").name == "h100-vllm-0.11"
    for model, engine, version in (
        ("gpt-oss-20b", None, "0.11"),
        ("gpt-oss-120b", "sglang", "0.11"),
        ("gpt-oss-120b", None, "0.29"),
        ("gpt-oss-120b", None, None),
    ):
        assert hardware_of("H100", model, engine, version).steps is not None


def test_the_fitted_model_is_known_by_its_numbers(tmp_path: Path) -> None:
    own = model_folder(tmp_path / "prod-model", GPT_OSS_120B)
    assert hardware_of("H100", own, "vllm", "0.11").name == "h100-vllm-0.11"
    for name, change in (
        ("fewer-layers", {"num_hidden_layers": 24, "layer_types": GPT_OSS_120B["layer_types"][:24]}),
        ("not-quantised", {"quantization_config": None}),
    ):
        other = model_folder(tmp_path / name / "gpt-oss-120b", GPT_OSS_120B, **change)
        assert hardware_of("H100", other, "vllm", "0.11").steps is not None, name


def test_a_word_that_is_nothing_names_the_gpu_types_too() -> None:
    with pytest.raises(UsageError, match="nor a GPU type nor a file; did you mean H100"):
        hardware_of("H100X", "gpt-oss-120b", None, None)


def test_a_file_says_its_engine_itself() -> None:
    with pytest.raises(UsageError, match=r"leave --engine.*--hardware H100"):
        hardware_of("h100-vllm-0.11", "gpt-oss-120b", None, "0.29")


def test_the_digest_of_the_home_file_is_as_it_was() -> None:
    home = load_hardware("h100-vllm-0.11")
    assert home.fit is not None and home.fit.digest == digest_of(home) == "6d7c26b672c04192"
    with_numbers = home.fit.model_copy(update={"numbers": GPT_OSS.numbers, "formats": GPT_OSS.formats})
    assert digest_of(home.model_copy(update={"fit": with_numbers})) != home.fit.digest, "what a file has counts"


def test_a_seen_version_has_its_own_host_time() -> None:
    assert HOSTS.of("0.18") == HOSTS.versions["0.18"]


@pytest.mark.parametrize(("version", "nearest"), [("0.29", "0.20"), ("0.12", "0.11"), ("1.2", "0.20")])
def test_an_unseen_version_is_as_uncertain_as_versions_differ(version: str, nearest: str) -> None:
    found = HOSTS.of(version)
    assert found.step_ms == HOSTS.versions[nearest].step_ms
    between = 0.7937253933  # of 2.0, 0.5 and 0.8
    assert found.sd_ms == pytest.approx((between**2 + HOSTS.versions[nearest].sd_ms ** 2) ** 0.5)


def test_an_engine_that_was_never_measured_has_a_wide_host_time() -> None:
    unseen = host_of("sglang").of("0.5")
    assert (unseen.step_ms, unseen.sd_ms) == (0.0, 1.0)


@pytest.mark.usefixtures("ten_ms")
@pytest.mark.parametrize(("version", "sequence_us"), [("0.11", 27), ("0.13", 27), ("0.14", 7), ("0.29", 7)])
def test_the_host_and_sequences_are_added_to_every_step(version: str, sequence_us: float) -> None:
    """An engine that schedules one step at a time handles each sequence while the GPU waits."""
    hardware = computed("H200", "vllm", version)
    assert hardware.steps is not None
    own_s = 1e-3 * hardware.steps.correction.host_ms + 8 * sequence_us * 1e-6
    assert steps_of(hardware, GPT_OSS, TP4).step_s(8, 0, 1000) == pytest.approx(10e-3 + own_s)


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_other_engines_have_one_time_of_a_sequence(engine: str) -> None:
    assert {host_of(engine).sequence_us(each) for each in ("0.5", "1.2")} == {7.0}


@pytest.mark.usefixtures("ten_ms")
def test_a_level_without_ray_has_the_time_of_its_steps() -> None:
    hardware = computed("H200", "vllm", "0.18", bare=True)
    assert hardware.steps is not None
    level = Level(load=Closed(concurrency=1), num_requests=4, seed=0)
    workload = Workload(input_tokens=1000, output_tokens=100)
    (served,) = simulate(Deployment(topology=Collocated(pool=TP4)), [level], workload, hardware, GPT_OSS)
    tpot_s, ttft_s, _ = figures(served)
    host_s = 1e-3 * hardware.steps.correction.host_ms
    assert tpot_s == pytest.approx(10e-3 + host_s + 7e-6)
    path_s = 10e-3 + 1000 * 5e-6
    assert ttft_s == pytest.approx(path_s + 10e-3 + 1000e-6 + host_s)


@pytest.mark.usefixtures("ten_ms")
def test_without_ray_a_request_of_two_pools_has_a_longer_path() -> None:
    hardware = computed("H200", "vllm", "0.18", bare=True)
    level = Level(load=Closed(concurrency=1), num_requests=4, seed=0)
    workload = Workload(input_tokens=1000, output_tokens=100)
    ttfts_s = [
        figures(simulate(Deployment(topology=topology), [level], workload, hardware, GPT_OSS)[0]).ttft_s
        for topology in (Collocated(pool=TP4), parse_label("pd-spread-p1xtp4-d1xtp4"))
    ]
    longer_s = 1e-3 * (hardware.value("pd_overhead_ms") - hardware.value("overhead_ms"))
    assert longer_s > 0.05
    assert ttfts_s[1] - ttfts_s[0] == pytest.approx(longer_s, abs=0.04), "and decode's steps, and the transfer"


@pytest.mark.usefixtures("ten_ms")
def test_speculation_divides_decode_and_leaves_prefill() -> None:
    hardware = computed("H200", "vllm", "0.18", bare=True)
    plain = steps_of(hardware, GPT_OSS, TP4)
    guesses = Speculation(acceptance_length=2.5, draft_tokens=3)
    fast = steps_of(hardware.model_copy(update={"speculation": guesses}), GPT_OSS, TP4)
    assert isinstance(fast, Speculative)
    assert fast.step_s(8, 0, 1000) == pytest.approx(plain.step_s(32, 0, 250) / 2.5)
    assert fast.step_s(0, 500, 0) == plain.step_s(0, 500, 0)
    adds_s = plain.step_s(8, 500, 1000, 250) - plain.step_s(8, 0, 1000)
    assert fast.step_s(8, 500, 1000, 250) == pytest.approx(fast.step_s(8, 0, 1000) + adds_s)
    assert fast.limits.batch == 256


@pytest.mark.usefixtures("ten_ms")
def test_a_pool_of_another_type_has_that_types_steps_and_memory() -> None:
    both = computed("H100", "vllm", "0.11").model_copy(update={"beside": (computed("H200", "vllm", "0.18"),)})
    own, other = Pool(tp=4, gpu_type="H100"), Pool(tp=4, gpu_type="H200")
    assert kv_capacity_tokens(both, GPT_OSS, other) > kv_capacity_tokens(both, GPT_OSS, own)
    difference = steps_of(both, GPT_OSS, own).step_s(1, 0, 100) - steps_of(both, GPT_OSS, other).step_s(1, 0, 100)
    hosts = host_of("vllm").versions
    of_a_sequence_s = 1e-6 * (host_of("vllm").sequence_us("0.11") - host_of("vllm").sequence_us("0.18"))
    assert difference == pytest.approx(1e-3 * (hosts["0.11"].step_ms - hosts["0.18"].step_ms) + of_a_sequence_s)


@pytest.mark.usefixtures("ten_ms")
def test_a_request_far_longer_than_the_tables_is_refused() -> None:
    hardware = computed("H200", "vllm", "0.18")
    level = Level(load=Closed(concurrency=1), num_requests=1, seed=0)
    with pytest.raises(UsageError, match="524288 tokens; use shorter requests"):
        simulate(
            Deployment(topology=Collocated(pool=Pool(tp=8))),
            [level],
            Workload(input_tokens=524_200, output_tokens=100),
            hardware,
            GPT_OSS,
        )


def test_two_types_stand_beside_each_other() -> None:
    both = beside(computed("H100"), computed("H200"))
    assert (both.gpu_type, [each.gpu_type for each in both.beside]) == ("H100", ["H200"])
    assert (both.fit, both.error) == (None, None)
    assert beside(computed("H200"), computed("H200")) == computed("H200")
    assert both.common_node_gpus == 8
    unlike = beside(computed("H100"), computed("GB200"))
    assert [each.gpus_per_node for each in unlike.types] == [8, 4]
    assert unlike.common_node_gpus is None


@pytest.mark.usefixtures("ten_ms")
def test_experts_spread_over_more_than_a_node_are_an_estimate_that_says_so() -> None:
    hardware = computed("H200")
    assert steps_of(hardware, GPT_OSS, Pool(dp=8, expert_parallel=True)).step_s(1, 0, 100) > 0
    assert steps_of(hardware, GPT_OSS, Pool(tp=16)).step_s(1, 0, 100) > 0
    wide, narrow = (Pool(dp=dp, expert_parallel=True) for dp in (32, 8))
    assert steps_of(hardware, GPT_OSS, wide).step_s(1, 0, 100) > 0
    said = [
        {each.code for each in step_findings(hardware, GPT_OSS, [Deployment(topology=Collocated(pool=pool))])}
        for pool in (wide, narrow)
    ]
    assert ["experts_wider_than_tables" in codes for codes in said] == [True, False]


def test_without_ray_one_router_sees_every_request() -> None:
    assert [computed("H200", bare=bare).value("routers") for bare in (True, False)] == [1, 12]


def test_the_format_of_kv_cache_is_that_of_its_memory_and_of_its_transfer() -> None:
    plain = computed("H200")
    half = computed("H200", quant={"kvcache": "fp8"})
    shape = as_served(GPT_OSS, half)
    assert as_served(GPT_OSS, plain) == GPT_OSS and shape.kv_dtype == "fp8"
    tokens, doubled = (kv_capacity_tokens(plain, each, TP4) for each in (GPT_OSS, shape))
    assert doubled == pytest.approx(2 * tokens)
    assert kv_bytes_per_token_layer(shape) == 8 * 64 * 2
    unknown = computed("H200", quant={"kvcache": "fp3"})
    assert as_served(GPT_OSS, unknown) == GPT_OSS, "the tables refuse it by its name"
