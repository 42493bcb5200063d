#!/usr/bin/env bash
# Build UCX with EFA (SRD) and CUDA, and NIXL against it, into a prefix; --help for the options.
#
# Why: the UCX in the nixl wheel has an EFA module that needs the system's libefa and a matching rdma-core. Without a
# match UCX finds no EFA, and KV moves over TCP without a message. This build links both against the system's libraries.
set -euo pipefail

UCX_COMMIT=v1.21.0 # the first with UCX_MAX_HCA_PER_GPU=auto, with which NIXL uses all devices of a GPU
NIXL_COMMIT=1.3.2  # pinned by ray[serve,llm] 2.60: prefill and decode must have the same version
UCX_LEAST=1.20
UCX_GIT=https://github.com/openucx/ucx.git
NIXL_GIT=https://github.com/ai-dynamo/nixl.git

prefix=/opt/pdlab-nixl
build=''
ucx_source='' nixl_source=''
python=${PYTHON:-python3}
jobs=$(nproc)
efa=yes cuda=yes devices=yes dry='' wheel=''

usage() {
    cat <<END
usage: debug/build_nixl_ucx_efa.sh [options]

  --prefix DIR       install there (default $prefix)
  --build DIR        sources and objects (default PREFIX/build); finished steps are not repeated
  --ucx-source PATH  folder or tarball of UCX, if $UCX_GIT cannot be reached
  --nixl-source PATH folder or tarball of NIXL, if $NIXL_GIT cannot be reached
  --python PATH      the Python that serves (default $python)
  --wheel            also make a wheel to ship to other nodes (debug/install_on_nodes.py)
  --without-efa      build without EFA, for a test on a host without it
  --without-cuda     build without CUDA, for a test on a host without it
  --without-devices  build with EFA and CUDA on a machine without these devices, as for an image: check only the
                     built files, and do not run them
  --jobs N           compilers at once (default $jobs)
  --dry-run          print the steps and their commands, do nothing
  --help             this text

Steps: check, ucx-source, ucx, nixl-source, nixl, verify, and wheel. After a failure run it again: it continues with
the failed step. Then: python debug/test_nixl_connector_ray.py --strategy spread --backends UCX
END
}

say() { printf '%s\n' "build: $*" >&2; }
fail() {
    say "$1"
    [ $# -lt 2 ] || say "  $2"
    exit 1
}
bad_usage() {
    say "$1 (all options: --help)"
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
    --prefix | --build | --ucx-source | --nixl-source | --python | --jobs)
        [ $# -ge 2 ] || bad_usage "$1 needs a value"
        case $1 in
        --ucx-source | --nixl-source) [ -e "$2" ] || bad_usage "$1 $2 does not exist; give a folder or a tarball" ;;
        esac
        case $1 in
        --prefix) prefix=$2 ;;
        --build) build=$2 ;;
        --ucx-source) ucx_source=$2 ;;
        --nixl-source) nixl_source=$2 ;;
        --python) python=$2 ;;
        --jobs) jobs=$2 ;;
        esac
        shift
        ;;
    --wheel) wheel=yes ;;
    --without-efa) efa= ;;
    --without-cuda) cuda= ;;
    --without-devices) devices= ;;
    --dry-run) dry=yes ;;
    --help | -h)
        usage
        exit 0
        ;;
    *) bad_usage "unknown option $1" ;;
    esac
    shift
done
[[ $jobs =~ ^[1-9][0-9]*$ ]] || bad_usage "--jobs $jobs: must be a number of at least 1"
[[ $prefix = /* ]] || bad_usage "--prefix $prefix: must be an absolute path"
build=${build:-$prefix/build}

# state PATH: a checksum of a source, so that a changed source is built again.
state() {
    if [ -d "$1" ]; then find "$1" -type f -printf '%T@ %s %P\n' | sort; else cat "$1"; fi | cksum | tr ' ' -
}

# Sources and options of the build: a finished step is repeated if they change.
recipe="ucx=$UCX_COMMIT${ucx_source:+:$ucx_source:$(state "$ucx_source")}"
recipe="$recipe nixl=$NIXL_COMMIT${nixl_source:+:$nixl_source:$(state "$nixl_source")}"
recipe="$recipe efa=${efa:-no} cuda=${cuda:-no} prefix=$prefix python=$python"

# Reads from one agent to another, checks every byte, and checks that this used the UCX of this build.
READ='
import ctypes, os, sys, time
import nixl._api as api

size = 1 << 20
buffers = [ctypes.create_string_buffer(size), ctypes.create_string_buffer(os.urandom(size), size)]
agents = [api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"])) for name in ("reader", "owner")]
for agent, buffer in zip(agents, buffers):
    agent.register_memory([(ctypes.addressof(buffer), size, 0, "")], "DRAM")
reader, owner = agents
peer = reader.add_remote_agent(owner.get_agent_metadata())
mine, theirs = (reader.get_xfer_descs([(ctypes.addressof(buffer), size, 0)], "DRAM") for buffer in buffers)
handle = reader.initialize_xfer("READ", mine, theirs, peer)
state, deadline = reader.transfer(handle), time.monotonic() + 30
while state == "PROC" and time.monotonic() < deadline:
    state = reader.check_xfer_state(handle)
if state != "DONE" or buffers[0].raw != buffers[1].raw:
    sys.exit(f"NIXL did not read what is there: {state}")
libraries = sorted({line.split()[-1] for line in open("/proc/self/maps") if "/libucp" in line})
print("NIXL of", api.__file__, "read", size, "bytes with", *libraries)
elsewhere = [path for path in libraries if not path.startswith(os.path.realpath(sys.argv[1]) + "/")]
if elsewhere or not libraries:
    sys.exit(f"that is not the UCX of {sys.argv[1]}: NIXL was not built against it, or another nixl comes first")
'

run() {
    if [ -n "$dry" ]; then
        printf '  %s\n' "$(printf '%q ' "$@")"
    else
        "$@"
    fi
}

step() { # step NAME: run the function do_NAME once for this recipe
    local name=$1 stamp=$build/.done-$1
    if [ -n "$dry" ]; then
        printf '%s\n' "$name:"
        "do_${name//-/_}"
    elif [ "$name" != check ] && [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$recipe" ]; then
        say "$name: done before"
    else
        say "$name"
        # In a subshell, so that a step may change its folder or fail. Not in a condition, which would turn -e off.
        local code=0
        set +e
        (
            set -e
            "do_${name//-/_}"
        )
        code=$?
        set -e
        [ "$code" -eq 0 ] || fail "$name failed; see above, fix the cause, and run this again: finished steps are kept"
        mkdir -p "$build"
        printf '%s' "$recipe" >"$stamp"
    fi
}

need() { # need COMMAND WHAT-TO-INSTALL
    command -v "$1" >/dev/null || fail "$1 is missing" "$2"
}

do_check() {
    if [ -n "$dry" ]; then
        echo "  compilers, autotools, meson, ninja; ${efa:+EFA installer, rdma-core; }${cuda:+nvcc; }$python"
        return
    fi
    for tool in gcc g++ make; do need "$tool" "install a compiler (apt-get install build-essential)"; done
    if [ -z "$ucx_source" ] || [ -z "$nixl_source" ]; then need git "install git, or give --ucx-source and --nixl-source"; fi
    for tool in autoreconf libtoolize pkg-config; do
        need "$tool" "apt-get install autoconf automake libtool pkg-config"
    done
    need "$python" "give --python, the Python that runs Ray"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$python is older than 3.10"
    "$python" -c 'import pip' 2>/dev/null || fail "$python has no pip" "$python -m ensurepip"
    for module in meson ninja; do
        "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('mesonbuild' if '$module' == 'meson' else '$module') is None)" \
            || command -v "$module" >/dev/null || fail "$module is missing" "$python -m pip install meson ninja pybind11"
    done
    if [ -n "$efa" ]; then
        [ -e /opt/amazon/efa ] || fail "no EFA installer's files in /opt/amazon/efa" \
            "install it (docs/setup.md), or try without: --without-efa"
        [ -e /usr/include/infiniband/efadv.h ] || fail "rdma-core's headers lack EFA (infiniband/efadv.h)" \
            "apt-get install libibverbs-dev of the EFA installer, or --without-efa"
    fi
    if [ -n "$cuda" ]; then
        need nvcc "install the CUDA toolkit and put nvcc on PATH, or --without-cuda"
    fi
    return 0
}

fetch() { # fetch SOURCE GIT COMMIT FOLDER
    run rm -rf "$4"
    run mkdir -p "$build"
    if [ -z "$1" ]; then
        run git clone --quiet "$2" "$4"
        # A project's tags may begin with v.
        if [ -z "$dry" ] && ! git -C "$4" rev-parse --quiet --verify "$3^{commit}" >/dev/null; then set -- "$1" "$2" "v$3" "$4"; fi
        run git -C "$4" checkout --quiet "$3"
        [ -n "$dry" ] || say "$2 $3 is commit $(git -C "$4" rev-parse HEAD)"
    elif [ -d "$1" ]; then
        run cp -a "$1" "$4"
    else
        run mkdir -p "$4"
        run tar -xf "$1" -C "$4" --strip-components=1
    fi
}

do_ucx_source() { fetch "$ucx_source" "$UCX_GIT" "$UCX_COMMIT" "$build/ucx"; }
do_nixl_source() { fetch "$nixl_source" "$NIXL_GIT" "$NIXL_COMMIT" "$build/nixl"; }

do_ucx() {
    run cd "$build/ucx"
    if [ -n "$dry" ] || [ ! -x configure ]; then run ./autogen.sh; fi
    # As in UCX's contrib/configure-release, but with logging: the table of protocols proves the wire.
    local options=(--prefix="$prefix" --enable-shared --disable-static --disable-doxygen-doc --enable-optimizations
        --disable-debug --disable-assertions --disable-params-check --enable-devel-headers --enable-cma --enable-mt
        --without-go --without-java)
    if [ -n "$efa" ]; then options+=(--with-verbs --with-efa --without-rdmacm); else options+=(--without-verbs); fi
    if [ -n "$cuda" ]; then
        options+=(--with-cuda="$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")
    else
        options+=(--without-cuda)
    fi
    run ./configure "${options[@]}"
    run make -j "$jobs"
    run make install
}

do_nixl() {
    run cd "$build/nixl"
    local options=(--prefix="$prefix" --libdir=lib --buildtype=release -Ducx_path="$prefix")
    [ -n "$cuda" ] || options+=(-Ddisable_gds_backend=true)
    run rm -rf "$build/nixl-objects"
    run "$python" -m mesonbuild.mesonmain setup "$build/nixl-objects" "${options[@]}"
    run "$python" -m mesonbuild.mesonmain install -C "$build/nixl-objects"
    # The Python package, built against the same libraries.
    run env PKG_CONFIG_PATH="$prefix/lib/pkgconfig" LD_LIBRARY_PATH="$prefix/lib" \
        "$python" -m pip install --no-deps --force-reinstall --target "$prefix/python" .
}

verify_version() {
    run "$prefix/bin/ucx_info" -v
    if [ -n "$dry" ]; then
        echo "  that is UCX $UCX_LEAST or later"
        return
    fi
    local version
    version=$("$prefix/bin/ucx_info" -v | sed -n 's/^# Library version: *//p')
    [ "$(printf '%s\n' "$UCX_LEAST" "$version" | sort -V | head -n 1)" = "$UCX_LEAST" ] || fail \
        "the UCX built is ${version:-of an unknown version}, and $UCX_LEAST is the first with zero-copy over SRD" \
        "give --ucx-source of a later one"
}

do_verify_files() { # without devices and drivers ucx_info lists no srd, and NIXL may not load
    verify_version
    local file wanted=("$prefix/lib/plugins/libplugin_UCX.so")
    if [ -n "$efa" ]; then wanted+=("$prefix/lib/ucx/libuct_ib_efa.so"); fi
    if [ -n "$cuda" ]; then wanted+=("$prefix/lib/ucx/libuct_cuda.so"); fi
    if [ -n "$dry" ]; then
        printf '  there is %s\n' "${wanted[@]}"
        return
    fi
    for file in "${wanted[@]}"; do
        [ -e "$file" ] || fail "built without $file" "look at the summary of configure in $build, and at meson's"
    done
    say "srd and a read by NIXL were not tried: run debug/doctor.py and the transfer check on the nodes"
}

do_verify() {
    verify_version
    if [ -n "$dry" ]; then
        [ -z "$efa" ] || echo "  $prefix/bin/ucx_info -d lists srd"
        echo "  a NIXL agent of $prefix/python reads from another, with the UCX of $prefix"
        return
    fi
    if [ -n "$efa" ]; then
        "$prefix/bin/ucx_info" -d | grep 'Transport: srd' >/dev/null || fail "UCX built, but ucx_info shows no srd" \
            "UCX_LOG_LEVEL=info UCX_MODULE_LOG_LEVEL=info $prefix/bin/ucx_info -d shows the reason"
    fi
    env LD_LIBRARY_PATH="$prefix/lib" NIXL_PLUGIN_DIR="$prefix/lib/plugins" PYTHONPATH="$prefix/python" \
        "$python" -c "$READ" "$prefix" || fail "the NIXL built does not read" \
        "built: $(cd "$prefix/python" 2>/dev/null && echo nixl*); \`import nixl\` takes nixl_cuNN of torch's CUDA version"
    # That read may have used shared memory. It is unknown whether one process can connect to itself over SRD (never run
    # on EFA hardware), so a failure is reported and does not stop the build.
    if [ -n "$efa" ] && ! env UCX_TLS=srd LD_LIBRARY_PATH="$prefix/lib" NIXL_PLUGIN_DIR="$prefix/lib/plugins" \
        PYTHONPATH="$prefix/python" "$python" -c "$READ" "$prefix"; then
        say "NIXL did not read with only UCX_TLS=srd: check the wire between two nodes before you trust this build"
    fi
}

do_wheel() {
    run mkdir -p "$prefix/wheels"
    run cd "$build/nixl"
    run env PKG_CONFIG_PATH="$prefix/lib/pkgconfig" LD_LIBRARY_PATH="$prefix/lib" \
        "$python" -m pip wheel --no-deps --wheel-dir "$prefix/wheels" .
}

for name in check ucx-source ucx nixl-source nixl; do step "$name"; done
if [ -n "$devices" ]; then step verify; else step verify-files; fi
if [ -n "$wheel" ]; then step wheel; fi
[ -n "$dry" ] && exit 0
say "done in $prefix. On every node, where \`ray start\` runs:"
say "  export LD_LIBRARY_PATH=$prefix/lib PYTHONPATH=$prefix/python NIXL_PLUGIN_DIR=$prefix/lib/plugins"
say "then: python debug/doctor.py; python debug/test_nixl_connector_ray.py --strategy spread --backends UCX"
