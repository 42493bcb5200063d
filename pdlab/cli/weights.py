"""``python -m pdlab weights``: check that a model's weights are on every node, or download them before a launch."""

from __future__ import annotations

from typing import Any

from pdlab.core import defaults
from pdlab.core.arguments import MODEL_HELP
from pdlab.core.catalog import found_model, known_models
from pdlab.core.command_lines import how_to_fetch, is_folder_word
from pdlab.core.commands import PDLAB
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.settings import Seconds, Settings, setting
from pdlab.core.text import byte_size

MISSING = 3

EPILOG = f"""\
examples:
  {PDLAB} weights                      check the files of gpt-oss-120b on every node of the Ray cluster
  {PDLAB} weights --fetch              download them there, all nodes at once (65 GB for gpt-oss-120b)
  {PDLAB} weights --here --fetch       download on this machine only, into HF_HOME (set it as for ray start)

exit code: 0 they are everywhere, 3 something is missing or broken, 2 bad command line
models of configs/models/: {", ".join(known_models())}
"""


class WeightsSettings(Settings):
    """Which model's files to check or download, and where."""

    COMMAND = "weights"
    ABOUT = "Check that a model's files are on every node, where vLLM looks for them, or download them."
    EXAMPLES = EPILOG

    model: str = setting(defaults.MODEL, MODEL_HELP, "which files, and where", value="NAME|PATH")
    here: bool = setting(False, "only this machine, without Ray", "which files, and where")
    fetch: bool = setting(False, "download what is missing, on all nodes at once", "download")
    timeout_s: Seconds = setting(7200.0, "time limit of a download", "download", value="S")


@command(WeightsSettings)
def main(settings: WeightsSettings) -> int:
    """Check or download."""
    shape, source = found_model(settings.model)
    if source is None:
        print(f"{settings.model} is built by pdlab at the first launch: there is nothing to fetch")
        return 0
    if settings.fetch and is_folder_word(source):
        raise UsageError(
            f"--model {settings.model} is a folder, and --fetch downloads: {how_to_fetch(source, here=True)}"
        )
    harmony = shape is not None and shape.architecture.startswith("GptOss")
    nodes = _this_machine(settings, source, harmony) if settings.here else _nodes(settings, source, harmony)
    for name, node in nodes.items():
        print(line(name, source, node))
    if not any(node["missing"] or node["broken"] for node in nodes.values()):
        return 0
    if not settings.fetch:
        print(f"fetch them before the nodes cost money: {how_to_fetch(source, here=settings.here)}")
    return MISSING


def line(name: str, source: str, node: dict[str, Any]) -> str:
    """The state of the files on one node, in one line."""
    error = f"; {node['error']}" if node.get("error") else ""
    missing: list[str] = node["missing"]
    broken: dict[str, str] = node["broken"]
    if broken:
        named = "; ".join(f"{file}: {why}" for file, why in list(broken.items())[:3])
        more = f"; and {len(broken) - 3} more" if len(broken) > 3 else ""
        return (
            f"{name} ({node['host']}): BROKEN of {source}: {named}{more} (remove them, and what they link to, from "
            f"{node['folder']}){error}"
        )
    if not missing:
        return f"{name} ({node['host']}): {source} is there, {byte_size(node['bytes'])} in {node['folder']}{error}"
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return f"{name} ({node['host']}): MISSING of {source}: {shown}{error}"


def _this_machine(settings: WeightsSettings, source: str, harmony: bool) -> dict[str, dict[str, Any]]:
    from pdlab.remote import weights

    return {
        "here": weights.fetch(source, settings.timeout_s, harmony) if settings.fetch else weights.local_weights(source)
    }


def _nodes(settings: WeightsSettings, source: str, harmony: bool) -> dict[str, dict[str, Any]]:
    from pdlab.cluster.connection import Cluster
    from pdlab.remote import weights

    with Cluster(otherwise=", or look at this machine only with --here") as cluster:
        if not settings.fetch:
            return cluster.call_every_node(weights.local_weights, source)
        return cluster.call_every_node(
            weights.fetch, source, settings.timeout_s, harmony, timeout_s=settings.timeout_s + 600
        )
