"""The second fidelity on vLLM's own scheduler: that it agrees with the simulator, and every name of vLLM it uses."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
from contract.conftest import parameters, quietly

from pdlab.core.catalog import load_model, require_shape
from pdlab.core.deployment import Collocated, Deployment, Pool, Topology, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.lengths import parse_lengths
from pdlab.core.workload import Closed, Level, Workload
from pdlab.sim.hardware import load_hardware
from pdlab.sim.level import SimulatedLevel, figures
from pdlab.sim.simulator import simulate
from pdlab.sim.vllm_engine import VllmEngine, simulate_with_vllm
from pdlab.sim.vllm_scheduler import prompt_tokens, scheduler_parts

pytestmark = pytest.mark.usefixtures("vllm_scheduling", "import_warnings_aside")

HARDWARE = load_hardware("h100-vllm-0.11")
HYBRID = HARDWARE.model_copy(update={"hybrid_kv": True})
SHAPE = load_model("gpt-oss-120b")
COLLOCATED = Deployment(topology=parse_label("collocated-1xtp2"))
PD = Deployment(topology=parse_label("pd-spread-p1xtp2-d1xtp2"))
WORKLOAD = Workload(input_tokens=2000, output_tokens=60)
LONG = Workload(input_tokens=5000, output_tokens=250)
LEVELS = [Level(load=Closed(concurrency=n), num_requests=4 * n, seed=0) for n in (2, 8)]


def both(
    deployment: Deployment, workload: Workload = WORKLOAD, levels: list[Level] = LEVELS, **options: Any
) -> tuple[SimulatedLevel, SimulatedLevel]:
    """The last of the levels: by the simulator, and by vLLM's scheduler with as many steps in flight (by default 1)."""
    hardware = options.pop("hardware", HARDWARE)
    steps = options.pop("steps_in_flight", 1)
    assert SHAPE is not None
    assert hardware.steps_in_flight == 1
    constant = hardware.constants["steps_in_flight"].model_copy(update={"value": steps})
    own = hardware.model_copy(update={"constants": hardware.constants | {"steps_in_flight": constant}})
    one = simulate(deployment, levels, workload, own, SHAPE, **options)
    other = simulate_with_vllm(deployment, levels, workload, hardware, SHAPE, asynchronous=steps == 2, **options)
    return one[-1], other[-1]


class TestAgreement:
    @pytest.mark.parametrize("hardware", [HARDWARE, HYBRID], ids=["full", "hybrid"])
    @pytest.mark.parametrize("options", [{}, {"prefix_hit_rate": 0.5}, {"prompts": "repeated"}], ids=str)
    def test_collocated_within_half_a_percent(self, hardware: Any, options: dict[str, Any]) -> None:
        one, other = both(COLLOCATED, hardware=hardware, **options)
        assert tuple(figures(other)) == pytest.approx(tuple(figures(one)), rel=0.005)
        assert sum(other.computed_tokens) == pytest.approx(sum(one.computed_tokens), rel=0.001)

    def test_pd_within_a_percent(self) -> None:
        """Reads that begin, and are seen, when steps are launched: `test_decode_steps.py` has their moments."""
        one, other = both(PD)
        assert tuple(figures(other)) == pytest.approx(tuple(figures(one)), rel=0.01)
        assert other.transferred_bytes == one.transferred_bytes

    @pytest.mark.parametrize("steps_in_flight", [1, 2], ids=["sync", "async"])
    @pytest.mark.parametrize(
        ("label", "hardware", "workload", "concurrency", "within"),
        [
            ("collocated-1xtp1", HARDWARE, LONG, 16, 0.01),
            ("collocated-1xtp1", HARDWARE, Workload(input_tokens=4000, output_tokens=500), 20, 0.01),
            ("collocated-1xtp1", HARDWARE, Workload(input_tokens=500, output_tokens=1000), 64, 0.01),
            ("collocated-1xtp1", HARDWARE, Workload(lengths=parse_lengths("uniform:0.3-1.7")), 24, 0.01),
            ("collocated-1xtp1", HYBRID, LONG, 32, 0.01),
            ("collocated-1xtp1", HYBRID, Workload(input_tokens=500, output_tokens=1500), 64, 0.01),
            ("pd-spread-p1xtp1-d1xtp1", HARDWARE, Workload(input_tokens=4000, output_tokens=500), 32, 0.05),
            ("pd-spread-p1xtp1-d1xtp1", HARDWARE, Workload(input_tokens=500, output_tokens=1000), 64, 0.05),
        ],
        ids=["long", "preempted", "growing", "mixed", "windows", "growing-windows", "pd", "pd-growing"],
    )
    def test_short_memory(
        self, label: str, hardware: Any, workload: Workload, concurrency: int, within: float, steps_in_flight: int
    ) -> None:
        """KV memory is full: vLLM's order of preemption, its blocks, and the moments at which they become free."""
        levels = [Level(load=Closed(concurrency=concurrency), num_requests=2 * concurrency, seed=0)]
        deployment = Deployment(topology=parse_label(label))
        one, other = both(deployment, workload, levels, hardware=hardware, steps_in_flight=steps_in_flight)
        assert one.kv_full > 0.1
        assert other.kv_full == pytest.approx(one.kv_full, abs=0.05)
        assert tuple(figures(other)) == pytest.approx(tuple(figures(one)), rel=within)
        assert sum(other.computed_tokens) == pytest.approx(sum(one.computed_tokens), rel=max(within, 0.02))

    @pytest.mark.parametrize(("steps_in_flight", "within"), [(1, 0.02), (2, 0.05)], ids=["sync", "async"])
    @pytest.mark.parametrize("label", ["collocated-1xtp2", "pd-spread-p1xtp2-d1xtp2"])
    def test_full_batches(self, label: str, steps_in_flight: int, within: float) -> None:
        """Twice as many requests are in flight as may run. With two steps in flight vLLM's next step is scheduled
        before it knows that a sequence has ended, and the simulator's is not."""
        few = Deployment(topology=parse_label(label)).with_engine_kwargs({"max_num_seqs": 6})
        levels = [Level(load=Closed(concurrency=12), num_requests=60, seed=0)]
        one, other = both(few, LONG, levels, steps_in_flight=steps_in_flight)
        assert tuple(figures(other)) == pytest.approx(tuple(figures(one)), rel=within)
        free, _ = both(Deployment(topology=parse_label(label)), LONG, levels, steps_in_flight=steps_in_flight)
        assert figures(one).ttft_s > figures(free).ttft_s + 0.5 * (figures(one).tpot_s or 0.0) * 250

    @pytest.mark.parametrize("label", ["collocated-1xtp2", "pd-spread-p1xtp2-d1xtp2"])
    def test_smaller_steps(self, label: str) -> None:
        """A prompt of 5,000 tokens takes five steps of the engine argument's 1,024 tokens."""
        topology = parse_label(label)
        small = Deployment(topology=topology).with_engine_kwargs({"max_num_batched_tokens": 1024})
        levels = [Level(load=Closed(concurrency=8), num_requests=40, seed=0)]
        one, other = both(small, LONG, levels)
        assert tuple(figures(other)) == pytest.approx(tuple(figures(one)), rel=0.01)
        whole, _ = both(Deployment(topology=topology), LONG, levels)
        assert figures(one).ttft_s != pytest.approx(figures(whole).ttft_s, rel=0.03)

    @pytest.mark.parametrize("hardware", [HARDWARE, HYBRID], ids=["full", "hybrid"])
    @pytest.mark.parametrize("label", ["collocated-1xtp1", "pd-spread-p1xtp1-d1xtp2"])
    def test_prompts_that_a_small_cache_has_evicted(self, label: str, hardware: Any) -> None:
        """With windows vLLM finds a prompt as a whole or not at all, and frees the window at its end early."""
        levels = [Level(load=Closed(concurrency=n), num_requests=5 * n, seed=0) for n in (4, 8)]
        deployment = Deployment(topology=parse_label(label))
        one, other = both(deployment, LONG, levels, hardware=hardware, prompts="repeated")
        assert sum(one.computed_tokens) < sum(one.input_tokens)
        assert tuple(figures(other)) == pytest.approx(tuple(figures(one)), rel=0.05)
        assert sum(other.computed_tokens) == pytest.approx(sum(one.computed_tokens), rel=0.05)

    @pytest.mark.parametrize("deployment", [COLLOCATED, PD], ids=["collocated", "pd"])
    def test_asynchronous_scheduling_delays_the_first_token_alone(self, deployment: Deployment) -> None:
        assert SHAPE is not None
        ways = [
            figures(simulate_with_vllm(deployment, LEVELS, WORKLOAD, HARDWARE, SHAPE, asynchronous=each)[-1])
            for each in (False, True)
        ]
        (before, after), tpot_s = (each.ttft_s for each in ways), ways[0].tpot_s
        assert tpot_s and ways[1].tpot_s == pytest.approx(tpot_s, rel=0.03)
        assert -0.5 < (after - before) / tpot_s < 3.5

    def test_the_same_again(self) -> None:
        assert SHAPE is not None
        ways = [simulate_with_vllm(PD, LEVELS, WORKLOAD, HARDWARE, SHAPE) for _ in range(2)]
        assert ways[0] == ways[1]


class TestScheduler:
    def test_decode_waits_for_remote_kv(self) -> None:
        """vLLM's own states: blocks for the whole prompt, WAITING_FOR_REMOTE_KVS, then the last token alone."""
        assert SHAPE is not None
        parts = scheduler_parts(HYBRID, SHAPE, Pool(tp=2), role="kv_consumer", asynchronous=False)
        engine = VllmEngine(parts, None, 0.0, HYBRID.step_tokens)
        engine.add(7, prompt_tokens(0, 1000, 0), 2, {"do_remote_prefill": True})
        step = engine.schedule()
        request = engine.scheduler.requests["7"]
        assert request.status.name == "WAITING_FOR_REMOTE_KVS" and not step.output.num_scheduled_tokens
        assert step.output.kv_connector_metadata.tokens == {"7": 1000}
        engine.take(step)
        engine.received.add("7")
        engine.take(engine.schedule())
        step = engine.schedule()
        assert step.output.num_scheduled_tokens == {"7": 1} and step.sampled == {"7"}
        (first,) = engine.take(step)
        assert first.request_id == "7" and first.finish_reason is None
        (second,) = engine.take(engine.schedule())
        assert second.finish_reason is not None

    def test_prefill_keeps_its_blocks_until_they_were_read(self) -> None:
        assert SHAPE is not None
        parts = scheduler_parts(HARDWARE, SHAPE, Pool(tp=2), role="kv_producer", asynchronous=False)
        engine = VllmEngine(parts, None, 0.0, HARDWARE.step_tokens)
        pool = engine.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        engine.add(7, prompt_tokens(0, 1000, 0), 1, {"do_remote_decode": True})
        (output,) = engine.take(engine.schedule())
        assert output.finish_reason is not None and pool.get_num_free_blocks() < free
        engine.sent.add("7")
        engine.take(engine.schedule())
        assert pool.get_num_free_blocks() == free

    def test_kv_cache_groups_and_memory(self) -> None:
        """gpt-oss has as many windowed layers as full ones; they share one pool of blocks of the same bytes."""
        assert SHAPE is not None
        kinds = {}
        for hardware in (HARDWARE, HYBRID):
            parts = scheduler_parts(hardware, SHAPE, Pool(tp=2), role=None, asynchronous=True)
            kv_cache = parts.make().kv_cache_config
            groups = [(type(each.kv_cache_spec).__name__, len(each.layer_names)) for each in kv_cache.kv_cache_groups]
            kinds[hardware.hybrid_kv] = (groups, kv_cache.num_blocks)
            assert parts.steps_at_once == 2
        assert kinds[False][0] == [("FullAttentionSpec", 36)]
        assert sorted(kinds[True][0]) == [("FullAttentionSpec", 18), ("SlidingWindowSpec", 18)]
        assert kinds[True][1] == pytest.approx(2 * kinds[False][1], abs=1)

    def test_prompts_share_what_they_should(self) -> None:
        long, short = prompt_tokens(3, 900, 0), prompt_tokens(3, 500, 0)
        assert long[:500] == short and len(long) == 900
        one, other = prompt_tokens(1, 600, 200), prompt_tokens(2, 600, 200)
        assert one[:200] == other[:200] and one[200:216] != other[200:216]


class TestRefused:
    def test_without_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert SHAPE is not None
        monkeypatch.setitem(sys.modules, "vllm.config", None)
        with pytest.raises(UsageError, match="not installed"):
            simulate_with_vllm(COLLOCATED, LEVELS, WORKLOAD, HARDWARE, SHAPE)

    @pytest.mark.parametrize(
        ("topology", "what"),
        [(parse_label("pd-fluid-4xtp2"), "fluid pools"), (Collocated(pool=Pool(tp=2, pp=2)), "pipeline stages")],
        ids=["fluid", "pp"],
    )
    def test_topologies(self, topology: Topology, what: str) -> None:
        assert SHAPE is not None
        with pytest.raises(UsageError, match=what):
            simulate_with_vllm(Deployment(topology=topology), LEVELS, WORKLOAD, HARDWARE, SHAPE)

    def test_other_models(self) -> None:
        shape = require_shape("deepseek-v3")
        with pytest.raises(UsageError, match="latent"):
            simulate_with_vllm(COLLOCATED, LEVELS, WORKLOAD, HARDWARE, shape)


class TestEngineCore:
    """What the virtual time takes from vLLM's loop and workers."""

    def test_steps_are_scheduled_while_one_runs(self) -> None:
        core = quietly("vllm.v1.engine.core").EngineCore
        assert "self.batch_queue_size = vllm_config.max_concurrent_batches" in inspect.getsource(core.__init__)
        loop = inspect.getsource(core.step_with_batch_queue)
        assert loop.index("self.scheduler.schedule(") < loop.index("self.scheduler.update_from_output(")

    def test_workers_read_and_look_when_a_step_is_launched(self) -> None:
        source = inspect.getsource(quietly("vllm.v1.worker.gpu.kv_connector").ActiveKVConnector.post_forward)
        assert source.index("start_load_kv") < source.index("get_finished")

    def test_scheduler_and_request(self) -> None:
        made_of = parameters(quietly("vllm.v1.core.sched.scheduler").Scheduler)
        assert {"vllm_config", "kv_cache_config", "structured_output_manager", "block_size"} <= set(made_of)
        assert made_of[:4] == ["vllm_config", "kv_cache_config", "structured_output_manager", "block_size"]
        assert parameters(quietly("vllm.v1.request").Request)[:4] == [
            "request_id",
            "prompt_token_ids",
            "sampling_params",
            "pooling_params",
        ]
