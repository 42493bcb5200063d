"""Loaded by every Python process of the local nodes at its start (this folder is on their PYTHONPATH).

Importing vLLM makes some ten million objects, and Python's cyclic collector looks at them over and
over: a quarter of the import. Collecting rarely instead of every 700 objects takes that away.

Those of an engine run what PDLAB_AT_START of their environment names, before anything of Ray's is imported
(pdlab/deploy/cpu_engine/prefork.py).

And nothing in these processes listens for the whole world (pdlab/cluster/loopback.py), or is imported for nothing
(pdlab/cluster/fast_start.py).
"""

import gc
import importlib
import os

from pdlab.cluster import fast_start, loopback

gc.set_threshold(200_000, 50, 50)
loopback.install()
fast_start.install()
if "PDLAB_AT_START" in os.environ:
    importlib.import_module(os.environ["PDLAB_AT_START"]).at_start()
