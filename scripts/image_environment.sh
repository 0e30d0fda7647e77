#!/bin/sh
# A step of the Dockerfile's build stages: makes /opt/plait, a virtual environment of its own.
#   image_environment.sh packages cpu|gpu TORCH_SPEC TORCH_ARGS PIP_ARGS   all but plait itself
#   image_environment.sh plait cpu|gpu      plait, its compiled kernels, byte code of what it imports
set -eu
step=$1
extra=$2
venv=/opt/plait

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

install_packages() {
    spec=$1 torch_args=$2 pip_args=$3
    python3 -m venv "$venv"
    # shellcheck disable=SC2086 # each holds several arguments
    pip install --no-compile --no-deps $pip_args $torch_args "$spec"
    # shellcheck disable=SC2086
    pip install --no-compile $pip_args -c constraints.txt setuptools "$spec"
    touch README.md LICENSE
    # plait without its own code: this layer is kept while only the sources change.
    # shellcheck disable=SC2086
    pip install --no-compile --no-build-isolation $pip_args -c constraints.txt ".[$extra]"
    remove_unused
}

# What serving never opens: the tests of torch and its headers, Mooncake's stand-alone programs.
remove_unused() {
    cd "$venv"/lib/python3.*/site-packages
    rm -rf torch/include torch/share torch/test torch/bin/*est* torch/bin/protoc* \
        mooncake/mooncake_client mooncake/mooncake_master mooncake/transfer_engine_bench
    cd - >/dev/null
}

install_plait() {
    pip install --no-compile --no-build-isolation --no-deps --no-index --force-reinstall .
    # An image keeps whole seconds only, and numba compares a kernel's date with its source's.
    find "$venv"/lib/python3.*/site-packages/kernels -name '*.py' -exec touch -d @1767225600 {} +
    cd / && GOMP_SPINCOUNT=1000 "$venv/bin/python" "$here/image_warm_up.py" "$extra"
}

here=$(cd "$(dirname "$0")" && pwd)
shift 2
case $step in
packages) install_packages "$@" ;;
plait) install_plait ;;
*) echo "image_environment.sh: step '$step' is unknown; expected packages or plait" >&2; exit 2 ;;
esac
