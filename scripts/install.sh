#!/bin/sh
# Makes .venv beside pyproject.toml and installs plait into it, pinned by constraints.txt.
#   scripts/install.sh        what serving needs
#   scripts/install.sh dev    that, and what tests and checks need
# PYTHON=/path/to/python3 chooses the interpreter. Nothing happens when the stamp is up to date.
set -eu
cd "$(dirname "$0")/.."

profile=${1:-serve}
case $profile in
serve | dev) ;;
*) echo "install.sh: profile '$profile' is unknown; expected serve or dev" >&2; exit 2 ;;
esac

torch_spec=torch==2.13.0
torch_cpu_index=https://download.pytorch.org/whl/cpu
venv=.venv
say() { echo "plait: $*" >&2; }

has_gpu=no
extras=cpu
other_engine=mooncake-transfer-engine-cuda13
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    has_gpu=yes
    extras=gpu
    other_engine=mooncake-transfer-engine-non-cuda
fi
if [ "$profile" = dev ]; then extras=$extras,dev; fi

# A dev environment serves as well, so either stamp satisfies `serve`.
fingerprint="$(cat pyproject.toml constraints.txt scripts/*.sh | cksum) gpu=$has_gpu"
is_current() { [ "$(cat "$venv/.plait-$1" 2>/dev/null)" = "$fingerprint" ]; }
if "$venv/bin/python" -c '' 2>/dev/null; then
    if is_current dev; then exit 0; fi
    if [ "$profile" = serve ] && is_current serve; then exit 0; fi
fi

is_fit='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))'
makes_venvs='import ensurepip, venv'
python=''
unfit=''
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
    "$candidate" -c "$is_fit" >/dev/null 2>&1 || continue
    if "$candidate" -c "$makes_venvs" >/dev/null 2>&1; then
        python=$candidate
        break
    fi
    unfit=${unfit:-$candidate}
done

if ! "$venv/bin/python" -c "$is_fit" 2>/dev/null || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    if [ -z "$python" ] && [ -n "$unfit" ]; then
        version=$("$unfit" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        say "$unfit ($version) cannot make virtual environments: its venv or ensurepip module is missing."
        say "On Debian or Ubuntu: apt-get install python$version-venv; then run this again."
        exit 1
    fi
    if [ -z "$python" ]; then
        found=$(${PYTHON:-python3} --version 2>&1 || true)
        say "no Python from 3.10 to 3.13 found (${PYTHON:-python3}: ${found:-absent})."
        say "Install one (Debian or Ubuntu: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3 …"
        exit 1
    fi
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi

# Without --no-compile most of the time goes into byte code of modules that are never imported.
pip() {
    verb=$1
    shift
    "$venv/bin/python" -m pip --disable-pip-version-check "$verb" --no-compile "$@"
}
rm -f "$venv/.plait-serve" "$venv/.plait-dev"

torch_is_there() {
    "$venv/bin/python" - "$torch_spec" <<'PY' 2>/dev/null
import importlib.metadata, sys
found = importlib.metadata.version("torch").split("+")[0]
sys.exit(found != sys.argv[1].split("==")[1])
PY
}

# Exit status 0 when the CPU index answers within seconds; its wheels are a tenth of the CUDA ones.
cpu_index_answers() {
    "$venv/bin/python" - "$torch_cpu_index/torch/" <<'PY' 2>/dev/null
import os, ssl, sys, urllib.request
context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
request = urllib.request.Request(sys.argv[1], method="HEAD")
urllib.request.urlopen(request, timeout=5, context=context)
PY
}

if ! torch_is_there; then
    if [ "$has_gpu" = yes ]; then
        say "installing $torch_spec"
        pip install -c constraints.txt "$torch_spec"
    else
        say "installing $torch_spec for the CPU (about 200 MB)"
        { cpu_index_answers && pip install --no-deps --index-url "$torch_cpu_index" "$torch_spec"; } ||
            pip install -c constraints.txt "$torch_spec"
    fi
fi

# The packages of the transfer engine share a folder: where another was installed, it goes first.
if ls -d "$venv"/lib/python*/site-packages/"$(echo "$other_engine" | tr - _)"-*.dist-info >/dev/null 2>&1; then
    "$venv/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes "$other_engine"
fi

say "installing plait[$extras] and the packages it needs (a minute or two)"
pip install --quiet -c constraints.txt -e ".[$extras]"
sh scripts/system_libraries.sh "$venv" "$has_gpu"
if [ "$profile" = dev ]; then
    sh scripts/helm.sh >/dev/null || say "the chart's tests need helm: see above"
fi
echo "$fingerprint" >"$venv/.plait-$profile"
say "installed in $venv"
