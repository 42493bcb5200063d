#!/usr/bin/env python3
"""As launch_gptoss.py, beside another deployment of this machine: NIXL's side channels need other ports than its own.

For `ttft_pairs.py`. A replica takes the next port where its own is in use (`pdlab.deploy.serving.nixl_port`), so the
launcher's check of these ports is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from pdlab.__main__ import script
    from pdlab.transfer.doctor import settings_rules

    settings_rules.side_channel_ports = lambda pools: ()
    script("launch")
