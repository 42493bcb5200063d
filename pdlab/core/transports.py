"""Names that NIXL and UCX know: backends, and transports of UCX_TLS.

tests/contract/test_transports.py compares them with the installed NIXL and the UCX inside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pdlab.core.text import choices

# Plugins of NIXL 1.3.2 that move memory between two machines; its others read and write storage.
BACKENDS = ("UCX", "LIBFABRIC", "GPUNETIO")
# Built from source on other stacks: not in NIXL's wheels.
EXTRA_BACKENDS = ("UCCL", "MOONCAKE")
STORAGE_BACKENDS = ("AZURE_BLOB", "GDS", "GDS_MT", "GUSLI", "HF3FS", "INFINIA", "OBJ", "POSIX")

# Aliases and transports of the UCX inside NIXL's wheels.
TRANSPORTS = frozenset(
    (
        *("all", "self", "mm", "sm", "shm", "sysv", "posix", "xpmem", "cma", "knem", "tcp"),
        *("ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5"),
        *("dc", "dc_x", "dc_mlx5", "srd", "gga", "gga_mlx5", "rdmacm", "sockcm"),
        *("ugni", "ugni_smsg", "ugni_udt", "ugni_rdma", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy"),
        *("rocm", "rocm_copy", "rocm_ipc", "rocm_gdr", "ze", "ze_copy", "ze_ipc", "ze_gdr", "gaudi", "gaudi_gdr"),
    )
)


def no_backend(names: Sequence[str]) -> str | None:
    """Why ``names`` are not NIXL backends for KV transfers; None if they are."""
    if not names or not all(re.fullmatch(r"[A-Z0-9_]+", name) for name in names):
        return "NIXL backends are names in capitals, for example UCX or UCX,LIBFABRIC"
    for name in names:
        if name in STORAGE_BACKENDS:
            return f"the NIXL backend {name} is for storage; use {' or '.join(BACKENDS)}"
        if name not in (*BACKENDS, *EXTRA_BACKENDS):
            return f"{name} is not a NIXL backend; {choices(name, (*BACKENDS, *EXTRA_BACKENDS))}"
    return None


def no_transport(text: str) -> str | None:
    """Why ``text`` is not a valid UCX_TLS value; None if it is valid.

    UCX takes names separated by commas; a leading ``^`` excludes them all, ``\\`` before a name turns its
    alias off, and ``:aux`` after a name uses that transport for connecting only.
    """
    for entry in text.removeprefix("^").split(","):
        name = entry.strip().removeprefix("\\").removesuffix(":aux")
        if name not in TRANSPORTS:
            problem = f"{entry.strip()!r} is not a transport of UCX" if name else "a name is missing"
            return f"{problem}; {choices(name, TRANSPORTS)}" if name else f"{problem}; for example tcp or cuda_copy,rc"
    return None
