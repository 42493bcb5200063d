"""Every Python process of the local nodes loads this at its start (this folder is on their PYTHONPATH).

- pdlab/cluster/loopback.py: no process listens beyond the node's address.
- pdlab/cluster/fast_start.py: no process imports or runs what it does not use.
- PDLAB_AT_START in the environment names a module whose ``at_start`` runs before the import of Ray
  (pdlab/deploy/cpu_engine/prefork.py).
"""

import importlib
import os

from pdlab.cluster import fast_start, loopback

fast_start.collect_seldom()
loopback.install()
fast_start.install()
if "PDLAB_AT_START" in os.environ:
    importlib.import_module(os.environ["PDLAB_AT_START"]).at_start()
