"""The images' HEALTHCHECK: exit code 0 while /live answers 200, of a front end at PLAIT_PORT or of
a worker at PLAIT_HEALTH_ADDRESS. Sees variables only, not what `--port` and other flags say."""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 4.0


def main() -> int:
    address = os.environ.get("PLAIT_HEALTH_ADDRESS") or f":{os.environ.get('PLAIT_PORT', '8000')}"
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
    sys.exit(main())
