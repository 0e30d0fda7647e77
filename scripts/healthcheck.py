"""The images' HEALTHCHECK: exit code 0 while /live answers 200, of a front end at --port or of a
worker at --health-address, and where there is nothing to ask: a worker without that option, another
verb. Reads the container's command line and variables, not a --config file."""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TIMEOUT_S = 4.0
FRONT_ENDS = ("serve", "frontend")
WORKERS = ("prefill", "decode")


def command_of(first_process: Path) -> list[str]:
    """What follows `plait` on the command line of the container's init; empty where it is not
    there, as with another entry point."""
    try:
        words = first_process.read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:  # hidden from other users
        return []
    names = [Path(word).name for word in words]
    return words[names.index("plait") + 1 :] if "plait" in names else []


def address_of(command: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """HOST:PORT to ask; None: nobody."""

    def option(name: str) -> str:
        flag, value = f"--{name}", variables.get(f"PLAIT_{name.upper().replace('-', '_')}", "")
        for word, following in zip(command, [*command[1:], ""], strict=False):
            if word == flag:
                value = following
            elif word.startswith(f"{flag}="):
                value = word.partition("=")[2]
        return value

    verb = command[0] if command else None
    if verb in FRONT_ENDS or (verb is None and not option("health-address")):
        return f"{option('host')}:{option('port') or '8000'}"
    return (option("health-address") or None) if verb in (None, *WORKERS) else None


def main(first_process: str = "/proc/1/cmdline") -> int:
    command = command_of(Path(first_process))
    address = address_of(command, os.environ)
    if address is None:
        print(f"plait {command[0]}: nothing to ask; a worker is asked at its --health-address")
        return 0
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host in ("", "0.0.0.0", "::"):
        host = "localhost"
    try:
        connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
        connection.request("GET", "/live")
        status = connection.getresponse().status
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"{host}:{port}/live: {error}", file=sys.stderr)
        return 1
    print(f"{host}:{port}/live: {status}")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
