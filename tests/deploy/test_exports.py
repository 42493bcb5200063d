"""Exports: what they carry, what they name as needed, and what is lost without pdlab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.values import strings

from pdlab.cli import launch
from pdlab.core.api_key import DIGEST, digest
from pdlab.core.files import PACKAGE
from pdlab.core.version import STACK
from pdlab.deploy import exports, serving_path
from pdlab.deploy.serving import builders

SPREAD = ["--pd-spread", "--cluster", "p5.48xlarge-x2"]
EVERYWHERE = ["--host", "0.0.0.0"]
URL = "https://files.example/pdlab-code-0123456789.zip"
KEY = "a-key-that-nobody-guesses"


class Exported:
    """A file, as text and as data, and what was said."""

    def __init__(self, text: str, said: str) -> None:
        self.text, self.said = text, said
        self.config: dict[str, Any] = yaml.safe_load(text)
        self.application: dict[str, Any] = self.config["applications"][0]
        self.env: dict[str, str] = self.config.get("controller_options", {}).get("runtime_env", {}).get("env_vars", {})
        lines = [line for line in text.splitlines() if line.startswith("#")]
        self.comments = " ".join(line.removeprefix("#").removeprefix(" - ").strip() for line in lines)


@pytest.fixture
def export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Exported]:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PDLAB_API_KEY", raising=False)

    def run(*words: str, flag: str = "--export") -> Exported:
        assert launch.main([*words, flag, "-"]) == 0
        captured = capsys.readouterr()
        return Exported(captured.out, captured.err)

    return run


def test_it_carries_the_environment_of_the_serving_path(export: Callable[..., Exported]) -> None:
    made = export(*SPREAD, *EVERYWHERE, "--no-api-key")
    assert made.env == serving_path.HAPROXY | serving_path.DIRECT
    assert "serve shutdown" in made.comments and "serve shutdown" in made.said
    elsewhere = export(*SPREAD, "--host", "10.0.0.1", "--no-api-key")
    assert "controller_options" not in elsewhere.config and "serve shutdown" not in elsewhere.comments


def test_it_names_what_the_cluster_must_have(export: Callable[..., Exported]) -> None:
    made = export(*SPREAD)
    for words in (*(f"{package} {version}" for package, version in STACK.items()), "imports pdlab", "code-zip"):
        assert words in made.comments and words in made.said, words
    # EFA's variables reach vLLM's workers from the environment of the node alone.
    assert "export FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1" in made.text and "--kv-backend LIBFABRIC" in made.comments
    named = export(*SPREAD, "--kv-backend", "UCX")
    assert "--kv-backend LIBFABRIC" not in named.comments
    tcp = export("--pd-spread", "--local", "2")
    assert "FI_PROVIDER" not in tcp.text and "LIBFABRIC" not in tcp.text


def test_it_can_carry_pdlab_itself(export: Callable[..., Exported]) -> None:
    made = export(*SPREAD, "--code-url", URL)
    assert made.application["runtime_env"] == {"py_modules": [URL]}
    assert made.application["args"]["kv_guard"] == {"send_sources": False}
    assert URL in made.comments and "imports pdlab" not in made.comments
    assert export(*SPREAD).application["args"]["kv_guard"] == {"send_sources": True}
    unguarded = export(*SPREAD, "--no-kv-guard", "--code-url", URL)
    assert "kv_guard" not in unguarded.application["args"]


def test_the_key_goes_with_it_as_a_digest(
    export: Callable[..., Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    carried = {}
    for name, words, variable in (
        ("file", ["--api-key-file", str(file)], ""),
        ("variable", [], KEY),
        ("own", ["--api-key"], ""),
        ("everywhere", EVERYWHERE, ""),
        ("loopback", [], ""),
        ("refused", ["--no-api-key", *EVERYWHERE], KEY),
        ("fetched code", ["--api-key-file", str(file), "--code-url", URL], ""),
    ):
        monkeypatch.setenv("PDLAB_API_KEY", variable)
        made = export(*SPREAD, *words)
        assert KEY not in made.text + made.said
        carried[name] = (made.env.get(DIGEST), "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" in made.env)
        assert ("No API key" in made.comments) == (name == "fetched code")
    own = digest((tmp_path / "cache" / "api-key").read_text().strip())
    digests = {"file": digest(KEY), "variable": digest(KEY), "own": own, "everywhere": own}
    assert carried == {
        **{name: (value, True) for name, value in digests.items()},
        **dict.fromkeys(("loopback", "refused", "fetched code"), (None, False)),
    }


def test_the_environment_can_be_sourced(export: Callable[..., Exported], tmp_path: Path) -> None:
    file = tmp_path / "ray env.sh"
    made = export(*SPREAD, *EVERYWHERE, "--export-env", str(file))
    assert f". '{file}'" in made.text
    done = subprocess.run(
        ["bash", "-c", f". '{file}' && env -0"], capture_output=True, text=True, timeout=60, check=True,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    seen = dict(each.split("=", 1) for each in done.stdout.split("\0") if "=" in each)
    needed = made.env | exports.EFA_ENV
    assert {name: seen.get(name) for name in needed} == needed and DIGEST in needed


def test_no_file_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    for words in (["--export-plain", str(kept)], ["--export", "-", "--export-env", str(kept)]):
        assert launch.main([*SPREAD, *words]) == 2
        assert f"{kept}: is there already" in capsys.readouterr().err and kept.read_text() == "kept"
    for words in (["--export-env", "x"], ["--export", "-", "--export-plain", "-"], ["--code-url", URL]):
        assert launch.main([*SPREAD, "--dry-run", *words]) == 2


def test_every_class_of_the_builders_is_a_named_loss() -> None:
    """A protection that is added to the builders is missing in Ray's: the list of losses has to name it."""
    mixed_in = {each.own.__name__ for each in builders.MIXINS}
    named = [name for loss in exports.LOSSES for name in loss.mixins]
    assert len(mixed_in) > 8 and len(named) == len(set(named))
    assert set(named) == mixed_in - {"SwitchesRoles"}  # of fluid pools, which Ray cannot serve at all


@pytest.mark.parametrize("mode", [["--pd-spread"], ["--pd-pack"], ["--collocated"], ["--collocated", "--dp", "2"]])
def test_plain_names_nothing_of_pdlabs(mode: list[str], export: Callable[..., Exported]) -> None:
    made = export(*mode, "--cluster", "p5.48xlarge-x2", flag="--export-plain")
    assert made.application["import_path"].startswith("ray.serve.llm:build_")
    assert [each for each in strings(made.application) if each.startswith("pdlab.")] == []
    assert "pdlab_deadline_s" not in str(made.application)


def test_plain_names_what_is_lost(export: Callable[..., Exported]) -> None:
    def lost(*words: str) -> set[int]:
        made = export(*words, flag="--export-plain")
        found = {number for number, loss in enumerate(exports.LOSSES) if loss.text in made.comments}
        assert found == {number for number, loss in enumerate(exports.LOSSES) if loss.text in made.said}
        return found

    kinds = [set(loss.keys) for loss in exports.LOSSES]
    always = {number for number, keys in enumerate(kinds) if "guard" in keys}
    of_guard = {number for number, keys in enumerate(kinds) if "kv_guard" in keys}
    of_cpus = {number for number, loss in enumerate(exports.LOSSES) if ("callback_config",) in loss.engine_keys}
    options = {number for number, keys in enumerate(kinds) if not keys} - of_cpus
    of_spans = {number for number, keys in enumerate(kinds) if "traces" in keys}
    everything = set(range(len(kinds))) - of_spans - options
    assert lost("--collocated", "--cluster", "p5.48xlarge-x2") == always
    assert lost(*SPREAD) == everything - of_cpus
    assert lost(*SPREAD, "--no-kv-guard") == everything - of_cpus - of_guard
    assert lost("--pd-spread", "--local", "2") == everything
    traced = ("--otlp-endpoint", "grpc://collector:4317")
    assert len(of_spans) == 1 and lost("--collocated", "--cluster", "p5.48xlarge-x2", *traced) == always | of_spans
    assert "No API key" in export(*SPREAD, *EVERYWHERE, flag="--export-plain").comments


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (["--early-token"], "The early token"),
        (["--reuse-first-token"], "The reuse of the first token"),
        (["--kv-poll-ms", "2"], "The check for arrived KV cache between steps"),
    ],
)
def test_plain_names_each_lost_option(option: list[str], text: str, export: Callable[..., Exported]) -> None:
    without, given = (export(*SPREAD, *words, flag="--export-plain") for words in ([], option))
    assert given.config == without.config  # the option has no effect there
    assert text not in without.comments
    assert text in given.comments and text in given.said


HASH = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
TURN = "ray.serve.experimental.round_robin_router.RoundRobinRouter"


@pytest.mark.parametrize(
    ("words", "routers"),
    [
        (["--collocated", "--num", "2", "--routing", "session"], [HASH]),
        (["--collocated", "--num", "2", "--routing", "round-robin"], [TURN]),
        (["--collocated", "--num", "2"], [None]),
        (["--pd-pack", "--p-tp", "2", "--d-tp", "2", "--p-num", "2", "--p-routing", "session"], [HASH, None]),
        (["--pd-pack", "--p-tp", "2", "--d-tp", "2", "--p-num", "2", "--p-routing", "round-robin"], [TURN, None]),
        (["--pd-pack", "--p-tp", "2", "--d-tp", "2", "--d-num", "2", "--d-routing", "session"], [None, HASH]),
    ],
)
def test_plain_routes_as_asked(words: list[str], routers: list[str | None], export: Callable[..., Exported]) -> None:
    args = export(*words, "--cluster", "p5.48xlarge-x2", flag="--export-plain").application["args"]
    engines = args.get("llm_configs") or [args["prefill_config"], args["decode_config"]]
    options = [each["deployment_config"] for each in engines]
    assert [each.get("request_router_config", {}).get("request_router_class") for each in options] == routers


def test_plain_takes_the_guard_out_of_several_connectors(export: Callable[..., Exported]) -> None:
    for store in (["--kv-offload-gb", "10"], ["--kv-connector", '{"kv_connector": "LMCacheConnectorV1"}']):
        made = export(*SPREAD, *store, flag="--export-plain")
        assert [each for each in strings(made.application) if each.startswith("pdlab.")] == []
        assert "pdlab_deadline_s" not in str(made.application)
        assert "MultiConnector" in strings(made.application)


def test_plain_keeps_the_classes_of_the_user(export: Callable[..., Exported]) -> None:
    own = '{"kv_connector": "Own", "kv_connector_module_path": "mine.connector"}'
    for mode in (SPREAD, ["--collocated", "--cluster", "p5.48xlarge-x2"]):
        words = [*mode, "--kv-connector", own, "--engine-arg", "worker_extension_cls=mine.Extension"]
        made = export(*words, flag="--export-plain")
        assert {"mine.connector", "mine.Extension"} <= set(strings(made.application))
        assert "small CPU nodes" not in made.comments


def test_plain_has_no_host_memory_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--collocated", "--local", "2", "--kv-offload-gb", "1", "--export-plain", "-"]) == 2
    assert "leave --kv-offload-gb out, or give --export" in capsys.readouterr().err


def test_ray_has_no_builder_for_a_fluid_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--pd-fluid", "--cluster", "p5.48xlarge-x2", "--export-plain", "-"]) == 2
    assert "no public builder for a fluid pool" in capsys.readouterr().err


def test_a_folder_that_only_nodes_have(export: Callable[..., Exported], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "/weights/gpt-oss-120b", "--cluster", "p5.48xlarge-x2", "--collocated"]
    unknown = export(*words)
    (config,) = unknown.application["args"]["llm_configs"]
    assert config["model_loading_config"] == {"model_id": "gpt-oss-120b", "model_source": "/weights/gpt-oss-120b"}
    assert "not on this machine" in unknown.said and "tool_call_parser" not in config["engine_kwargs"]
    known = export(*words, "--model-id", "gpt-oss-120b")
    assert known.application["args"]["llm_configs"][0]["engine_kwargs"]["tool_call_parser"] == "openai"
    assert "not on this machine" not in known.said
    assert launch.main([*words, "--dry-run"]) == 0
    assert "a launch checks that each node has it" in capsys.readouterr().err


def test_what_is_printed_to_launch_for_real_exports_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SPREAD, "--dry-run", "--export-k8s", str(tmp_path / "k.yaml"), "--image=a/b", "--hugepages"]
    assert launch.main([*words, "--k8s-name", "chat", "--p-tp", "2"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "launch_gptoss.py" in line)
    assert "--p-tp 2" in line and not [word for word in ("k8s", "image", "hugepages", "chat") if word in line]


def test_the_stack_is_that_of_the_project() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    for package, version in STACK.items():
        extra = "[serve,llm]" if package == "ray" else ""
        assert f'"{package}{extra}=={version}"' in text


def test_an_export_needs_neither_ray_nor_vllm(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pdlab.cli.launch import main\n"
        "code = main(sys.argv[1:])\nprint(code, sorted({'ray', 'vllm', 'torch'} & set(sys.modules)))\n"
    )
    words = [*SPREAD, "--export-k8s", str(tmp_path / "k.yaml"), "--image", "a/b"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.parametrize("name", ["ray.env", "my ray.env", "kept/ray.env"])
def test_the_printed_command_reads_the_environment_into_a_posix_shell(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(exports.env_script({"FI_PROVIDER": "efa"}))
    script = f"{exports.sourced(name)}\necho $FI_PROVIDER"
    for shell in filter(shutil.which, ("dash", "bash", "sh")):
        words = [shell, *(["--posix"] if shell == "bash" else []), "-c", script]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout == "efa\n", (shell, done.stderr)


def test_an_export_names_its_script_as_a_shell_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--pd-spread", "--cluster", "p5.48xlarge-x2", "--export", "app.yaml", "--export-env", "ray.env"]
    assert launch.main(words) == 0
    assert "#     . ./ray.env\n" in (tmp_path / "app.yaml").read_text()
