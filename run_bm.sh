#!/bin/sh
# Sweep load levels against a running deployment; the logic is in pdlab/bench.py (see --help).
here=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")" && pwd) || exit 1
python="$here/.venv/bin/python"
[ -x "$python" ] || python=python3
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m pdlab.bench "$@"
