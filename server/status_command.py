"""`plait status`: asks a running front end for its fleet and shows it."""

from __future__ import annotations

import os
import sys

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from server.status import FleetStatus, TierStatus

TIMEOUT_S = 10.0
PIPED_COLUMNS = 160  # of the table where no terminal says how wide it may be


class StatusError(Exception):
    """Why the fleet cannot be shown; the message names the URL and what is expected there."""


def main(url: str, api_key: str | None, *, as_json: bool) -> int:
    """Ask and print. `url` may end in /v1; without `api_key` OPENAI_API_KEY counts. Exit code 0,
    or 1 where there is no such answer."""
    try:
        body = _ask(url, api_key or os.environ.get("OPENAI_API_KEY"))
        status = _read(url, body)
    except StatusError as error:
        print(f"plait status: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(body.decode())
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    _show(console, status)
    return 0


def _ask(url: str, api_key: str | None) -> bytes:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    root = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(f"{root}/status", headers=headers, timeout=TIMEOUT_S)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
        raise StatusError(f"--url {url}: {error}; expected http://HOST:PORT") from error
    except httpx.HTTPError as error:
        raise StatusError(
            f"--url {url}: no answer: {error or type(error).__name__}; expected a running "
            "`plait serve` or `plait frontend`"
        ) from error
    if response.status_code == 401:
        raise StatusError(
            f"--url {url}: the key is refused; expected --api-key with one of the server's keys"
            if api_key
            else f"--url {url}: a key is needed; give --api-key, or OPENAI_API_KEY"
        )
    if response.status_code != 200:
        raise StatusError(f"--url {url}: answers {response.status_code}; expected a plait server")
    return response.content


def _read(url: str, body: bytes) -> FleetStatus:
    try:
        return msgspec.json.decode(body, type=FleetStatus)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StatusError(
            f"--url {url}: the answer is no fleet: {error}; expected a plait server"
        ) from error


def _show(console: Console, status: FleetStatus) -> None:
    parked = f", {status.parked} of them parked" if status.parked else ""
    console.print(f"{status.status}; {status.requests} requests unfinished{parked}")
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "instance", "pid", "host", "address", "ranks", "health"):
        table.add_column(heading)
    for heading in ("requests", "running", "waiting", "tokens", "rooms"):
        table.add_column(heading, justify="right")
    table.add_column("pages used + cached + free + fenced = total")
    for worker in status.workers:
        load = worker.load
        table.add_row(
            worker.role,
            worker.instance_id[:8],
            str(worker.pid),
            worker.host,
            worker.address,
            str(worker.ranks),
            worker.health,
            *(str(number) for number in (worker.requests, load.running, load.waiting)),
            *(str(number) for number in (load.waiting_tokens, load.rooms)),
            "\n".join(f"{name}: {_sum(tier)}" for name, tier in worker.pages.items()),
        )
    if status.workers:
        console.print(table)
    for place in status.places:
        if place.error:
            console.print(f"{place.place}: {place.error}", soft_wrap=True, markup=False)
    for refused in status.refused:
        console.print(
            f"refused: {refused.role} at {refused.address}: {refused.reason}",
            soft_wrap=True,
            markup=False,
        )
    for address in status.absent:
        console.print(f"no worker at {address}")


def _sum(tier: TierStatus) -> str:
    return f"{tier.used} + {tier.cached} + {tier.free} + {tier.fenced} = {tier.total}"
