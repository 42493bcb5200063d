#!/bin/sh
# Sweep load levels against a running deployment; the logic is in pdlab/cli/bench.py (see --help).
here=$(dirname -- "$(readlink -f -- "$0")") || exit 1
python=$here/.venv/bin/python
if [ ! -x "$python" ]; then
    python=python3
    if ! "$python" -c 'import pydantic, yaml' 2>/dev/null; then
        echo "error: no .venv beside this script and python3 lacks pdlab's packages; see README.md" >&2
        exit 2
    fi
fi
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m pdlab bench "$@"
