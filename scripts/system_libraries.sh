#!/bin/sh
# Brings what the transfer engine needs from the system: by apt-get where it runs as root, else
# unpacked into the environment, where plait finds it. Never fails: without them plait serves
# colocated, and says what is missing when it is asked for more.
#   scripts/system_libraries.sh VENV yes|no      (yes: for CUDA)
set -u
venv=$1
for_cuda=$([ "$2" = yes ] && echo True || echo False)
say() { echo "plait: $*" >&2; }

[ "$(uname -s)" = Linux ] || exit 0

missing() {
    "$venv/bin/python" -c "
from kvcache.transfer.system import missing_packages
print(*missing_packages(for_cuda=$for_cuda))"
}

packages=$(missing)
[ -n "$packages" ] || exit 0

install_as_root() {
    say "installing $packages"
    export DEBIAN_FRONTEND=noninteractive
    set -- install -qq --yes --no-install-recommends $packages
    apt-get "$@" >/dev/null 2>&1 || { apt-get -qq update && apt-get "$@" >/dev/null; }
}

# Packages that are not there yet, what they depend on included. Upgrades of others, which apt-get
# marks with the version in brackets, are not for one environment to make.
wanted() {
    apt-get $options --simulate --no-install-recommends install $packages 2>/dev/null |
        awk '$1 == "Inst" && $3 !~ /^\[/ { print $2 }' | grep -vE '^(libc6|libgcc-s1|libstdc\+\+6|gcc-.*)$'
}

unpack_privately() {
    say "unpacking $packages into $venv/lib/system"
    scratch=$(mktemp -d) || return 1
    trap 'rm -rf "$scratch"' EXIT
    options=''
    names=$(wanted)
    if [ -z "$names" ]; then
        mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial"
        options="-o Dir::State::Lists=$scratch/lists -o Dir::Cache=$scratch/cache"
        apt-get $options -qq update || return 1
        names=$(wanted)
    fi
    [ -n "$names" ] || return 1
    (cd "$scratch" && apt-get $options -qq download $names) || return 1
    for archive in "$scratch"/*.deb; do dpkg-deb -x "$archive" "$scratch/root" || return 1; done
    mkdir -p "$venv/lib/system"
    find "$scratch/root" -path '*/lib/*' -name 'lib*.so.*' -exec cp -P {} "$venv/lib/system/" \;
}

if command -v apt-get >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then install_as_root; else unpack_privately; fi
fi

packages=$(missing)
if [ -n "$packages" ]; then
    say "not installed: $packages (the names of Debian and Ubuntu; elsewhere install libibverbs,"
    say "libnuma and libcurl). Without them use: plait serve --colocated"
fi
exit 0
