"""What fault injection leans on inside Ray, Ray Serve and vLLM: tables, titles, names of actors, the lease."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from contract.conftest import by_value, printed, printed_without_pdlab, quietly

from pdlab.cluster import machine
from pdlab.faults import on_node, run, targets
from pdlab.faults.plan import FaultPlan

pytestmark = pytest.mark.usefixtures("ray_llm", "import_warnings_aside")
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


class TestRaysTables:
    """pdlab.faults.targets.classify."""

    def test_actors_and_jobs_have_what_is_read(self) -> None:
        source = inspect.getsource(quietly("ray._private.state"))
        for key in (
            "ActorClassName",
            "Name",
            "JobID",
            "Address",
            "NodeID",
            "State",
            "Pid",
            "DriverPid",
            "DriverIPAddress",
        ):
            assert f'"{key}"' in source, key
        state = quietly("ray._private.state")
        assert callable(state.actors) and callable(state.jobs)

    def test_a_dead_actors_state(self) -> None:
        states = quietly("ray.core.generated.gcs_pb2").ActorTableData.ActorState
        assert {"ALIVE", *targets._ENDED} <= set(states.keys())

    def test_the_proxys_name(self) -> None:
        constants = quietly("ray.serve._private.constants")
        name = quietly("ray.serve._private.utils").format_actor_name(constants.SERVE_PROXY_NAME, "node")
        assert name.startswith(targets.PROXY_ACTOR)

    def test_the_raylet_starts_workers_itself(self) -> None:
        """A survey takes the nearest raylet above its own process for the node's."""
        assert Path(quietly("ray._private.services").RAYLET_EXECUTABLE).name == on_node.RAYLET


class TestTitles:
    @pytest.mark.parametrize("variable", ["A", "B"])
    def test_is_not_set_after_a_change_of_the_first_variable(self, variable: str) -> None:
        """Then `machine.SPAWNED` and the parents tell what a process is."""
        title = f"{targets.ENGINE_TITLE}_DP0"
        program = (
            f"import os; os.environ[{variable!r}] = 'changed'; import setproctitle; "
            f"setproctitle.setproctitle({title!r}); print(open('/proc/self/cmdline').read().split('\\0')[0].strip())"
        )
        assert printed(program, env={"A": "1", "B": "2"}) == [sys.executable if variable == "A" else title]

    def test_a_process_that_is_spawned(self) -> None:
        line = quietly("multiprocessing.spawn").get_command_line(pipe_handle=1)
        assert machine.SPAWNED in str(line)

    def test_of_engine_cores_and_workers(self) -> None:
        core = inspect.getsource(quietly("vllm.v1.engine.core"))
        assert 'process_title = "EngineCore"' in core and 'process_title = f"EngineCore_DP{dp_rank}"' in core
        assert "set_process_title(process_title)" in core
        utils = inspect.getsource(quietly("vllm.utils.system_utils").set_process_title)
        assert 'f"{prefix}::{name}"' in utils
        prefix = quietly("vllm.envs").VLLM_PROCESS_NAME_PREFIX
        assert f"{prefix}::EngineCore" == targets.ENGINE_TITLE and f"{prefix}::Worker" == targets.WORKER_TITLE
        assert 'set_process_title(name="Worker")' in inspect.getsource(quietly("vllm.v1.executor.multiproc_executor"))

    def test_workers_that_are_actors(self) -> None:
        assert "class RayWorkerProc" in inspect.getsource(quietly("vllm.v1.executor.ray_executor_v2"))
        assert "RayWorkerWrapper" in inspect.getsource(quietly("vllm.v1.executor.ray_executor"))

    def test_serves_names_of_roles(self) -> None:
        source = inspect.getsource(quietly("ray.llm._internal.serve.serving_patterns.prefill_decode.builder"))
        assert "Prefill:" in source and "Decode:" in source
        assert run.ROLE_OF["Prefill"] == "prefill" and run.ROLE_OF["Decode"] == "decode"


class TestEngines:
    def test_the_lease(self) -> None:
        """The plans' ``lease_s`` is vLLM's default."""
        source = inspect.getsource(quietly(f"{NIXL}.base_scheduler"))
        assert f'"kv_lease_duration", {FaultPlan(faults=("all",)).lease_s:g}' in source

    def test_the_gauge_of_kv_blocks(self) -> None:
        assert f'name="vllm:{run.POOL_GAUGE}"' in inspect.getsource(quietly("vllm.v1.metrics.loggers"))

    def test_a_request_has_a_salt_of_its_own_and_gives_token_ids(self) -> None:
        fields = quietly("vllm.entrypoints.openai.completion.protocol").CompletionRequest.model_fields
        assert {"cache_salt", "return_token_ids", "return_tokens_as_token_ids", "ignore_eos", "seed"} <= set(fields)

    def test_an_engine_goes_on_stepping_while_blocks_are_pinned(self) -> None:
        """So its gauge is set until they are free, and 0 is what it says last."""
        scheduler = quietly("vllm.v1.core.sched.scheduler").Scheduler
        source = inspect.getsource(scheduler.has_finished_requests)
        assert "self.connector" in source and "self.requests" in source


class TestWhereThereIsNoPdlab:
    def test_what_acts_travels_by_value(self) -> None:
        code = (
            "import pickle, subprocess\n"
            "hand = pickle.load(sys.stdin.buffer)()\n"
            "facts = hand.survey(None, True)\n"
            "assert facts['own'] > 0 and facts['raylet'] is None\n"
            "child = subprocess.Popen(['sleep', '100'])\n"
            "started = int(open(f'/proc/{child.pid}/stat').read().rsplit(')', 1)[1].split()[19])\n"
            "hand.send_later([(child.pid, started)], [(0.1, 19), (0.1, 18), (0.1, 9)])\n"
            "assert child.wait(60) == -9\n"
            "print(hand.run(['echo', 'x']))\n"
        )
        sent = by_value(on_node.NodeActor, "pdlab.remote", on_node.__name__)
        assert printed_without_pdlab(code, sent=sent) == ["x", ""]
