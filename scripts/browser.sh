#!/bin/sh
# Brings what the tests of the chat page need: a Chromium of the system's packages and playwright.
#   scripts/browser.sh VENV
# CHROMIUM=/path/to/chromium names one that is there already.
set -eu
venv=$1
say() { echo "plait: $*" >&2; }

"$venv/bin/python" -m pip --disable-pip-version-check install --quiet -c constraints.txt -e ".[browser]"

chromium=${CHROMIUM:-chromium}
if command -v "$chromium" >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "installing chromium"
    export DEBIAN_FRONTEND=noninteractive
    set -- install -qq --yes --no-install-recommends chromium
    apt-get "$@" >/dev/null 2>&1 || { apt-get -qq update && apt-get "$@" >/dev/null; }
    exit 0
fi
say "no $chromium found. Install one (Debian: apt-get install chromium) or name it: CHROMIUM=/path make test-browser"
exit 1
