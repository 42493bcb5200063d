"""What pdlab.deploy.cpu_engine.prefork stands on in vLLM and Ray."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from contract.conftest import ROOT, printed, quietly

from pdlab.deploy.cpu_engine import prefork

pytestmark = pytest.mark.usefixtures("ray_llm", "import_warnings_aside")

ENV = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
PROGRAM = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print("THREADS", len(os.listdir("/proc/self/task")), [name for name in ("nixl", "nixl._api") if name in sys.modules])
"""


def test_vllm_starts_its_engine_core_with_the_context_that_we_replace() -> None:
    engines = quietly("vllm.v1.engine.utils")
    assert inspect.signature(engines.get_mp_context).parameters.keys() == set()
    source = inspect.getsource(engines.CoreEngineProcManager.__init__)
    assert "context = get_mp_context()" in source and "context.Process(" in source
    assert "target=EngineCoreProc.run_engine_core" in source and "proc.start()" in source


def test_a_replica_may_fork_after_these_imports() -> None:
    """One thread, and UCX not loaded: a child has no other thread, and UCX would be the parent's."""
    assert printed(PROGRAM, *prefork.ENGINE, env=ENV)[-1] == "THREADS 1 []"


def test_rays_workers_are_told_by_the_name_of_their_script() -> None:
    node = quietly("ray._private.node")
    assert f'"{prefork.WORKER}"' in inspect.getsource(node)
    script = Path(inspect.getfile(node)).parent / "workers" / prefork.WORKER
    assert script.is_file() and "ray._private.worker.connect(" in script.read_text(encoding="utf-8")
    variables = inspect.getsource(quietly("ray._private.runtime_env.context").RuntimeEnvContext.exec_worker)
    assert "update_envs(self.env_vars)" in variables and "os.execvp(" in variables


def test_the_raylet_waits_as_long_as_we_say() -> None:
    raylet = Path(quietly("ray._private.services").RAYLET_EXECUTABLE).read_bytes()
    assert b"worker_register_timeout_seconds" in raylet


WITHOUT_RAY = """
import importlib, os, sys
from pdlab.deploy.cpu_engine import engine_template
from pdlab.deploy.serving.vllm_names import RAY_UTILS
engine_template._import()
threads = len(os.listdir("/proc/self/task"))
of_ray = [name for name in sys.modules if name.partition(".")[0] == "ray"]
module = sys.modules[RAY_UTILS]
before, there = module.ray_is_available, module.ray_is_available()
importlib.reload(module)
def of_rays(value):
    name = getattr(value, "__module__", None) or getattr(value, "__name__", None) or ""
    return isinstance(name, str) and name.partition(".")[0] == "ray"
vllm = [(name, each) for name, each in list(sys.modules.items()) if name.startswith("vllm")]
has = {name for name, each in vllm if any(map(of_rays, vars(each).values()))}
print("FOUND", threads, of_ray, there, before(), sorted(has))
"""


def test_the_template_imports_vllm_without_ray_and_a_fork_adds_it() -> None:
    """One module of vLLM's uses Ray where it is. Loaded again, it does so for whoever has its functions already."""
    found = printed(WITHOUT_RAY, env={**ENV, "PYTHONPATH": str(ROOT)})[-1]
    assert found == "FOUND 1 [] False True ['vllm.v1.executor.ray_utils']"


TITLED = """
import setproctitle
setproctitle.setproctitle("VLLM::EngineCore")
print(open("/proc/self/cmdline").read().split(chr(0))[0].strip())
"""
# torch writes it again when it is imported (`pdlab.cluster.connection.WRITTEN`).
REWRITTEN = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/cache", **ENV, "PYTHONPATH": str(ROOT), "SPT_NOENV": "1"}


def test_imports_of_vllm_write_the_first_variable_and_then_no_title_is_set() -> None:
    imports = "".join(f"import {name}; " for name in prefork.ENGINE)
    assert printed(imports + TITLED, env=REWRITTEN)[-1] == sys.executable


def test_a_fork_of_the_template_has_a_title() -> None:
    program = "from pdlab.deploy.cpu_engine import engine_template; engine_template._import()" + TITLED
    assert printed(program, env=REWRITTEN)[-1] == "VLLM::EngineCore"


def test_the_engine_core_of_a_replica_has_a_title(tmp_path: Path) -> None:
    worker = tmp_path / prefork.WORKER
    worker.write_text(f"from pdlab.deploy.cpu_engine import prefork; prefork.at_start(){TITLED}", encoding="utf-8")
    ran = subprocess.run([sys.executable, str(worker)], env=REWRITTEN, check=True, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == "VLLM::EngineCore"


def test_rays_title_is_set_by_the_name_that_a_fork_replaces() -> None:
    worker = inspect.getsource(quietly("ray._private.worker"))
    assert "ray._raylet.setproctitle(" in worker
