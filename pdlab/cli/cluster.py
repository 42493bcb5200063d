"""Write the cluster file of the running Ray cluster; see --help."""

from __future__ import annotations

from pdlab.core.commands import PDLAB, RUN_LAUNCH, RUN_PLAN
from pdlab.core.exit_code import command
from pdlab.core.nodes import NODE_ID_LABEL, NODE_NAME_LABEL, ClusterNode, ClusterView
from pdlab.core.schema import to_yaml
from pdlab.core.settings import Settings, setting

EPILOG = f"""\
examples:
  {PDLAB} cluster > my.yaml            on a machine of the cluster
  {RUN_LAUNCH} --pd-spread --cluster my.yaml --dry-run
  {RUN_PLAN} --cluster my.yaml --gpus 16

The file has what Ray and the driver of each node report: GPUs with name, memory and NVLink, CPUs, the network.
They do not report everything. Add gpu_memory_gb and gpu_link for GPUs without NVML, and nvlink_domain for trays that
have NVLink between them.
"""


class ClusterSettings(Settings):
    """The name of the cluster in its file."""

    COMMAND = "cluster"
    ABOUT = "Print the cluster file of the running Ray cluster, for --cluster of launch and plan."
    EXAMPLES = EPILOG

    name: str | None = setting(
        None, "name of the cluster in the file", "output", value="NAME", otherwise="as the nodes were started"
    )


@command(ClusterSettings)
def main(settings: ClusterSettings) -> int:
    """Print the file."""
    from pdlab.deploy import launch

    print(cluster_file(launch.live_view(), settings.name), end="")
    return 0


def cluster_file(view: ClusterView, name: str | None = None) -> str:
    """The YAML file of the nodes, as if they were all free; `pdlab.core.catalog.load_cluster` reads it."""
    nodes = tuple(_whole(node) for node in view.nodes)
    return to_yaml(view.model_copy(update={"name": name or view.name, "nodes": nodes}))


def _whole(node: ClusterNode) -> ClusterNode:
    # A replacement node keeps the name, but has another id of Ray.
    labels = {
        key: value for key, value in node.labels.items() if key != NODE_ID_LABEL or NODE_NAME_LABEL not in node.labels
    }
    return node.model_copy(update={"free_gpus": None, "free_cpus": None, "labels": labels})
