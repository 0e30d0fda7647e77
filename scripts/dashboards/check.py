"""Do the dashboards show something, and do the alerts fire? Tried on a real fleet.

    python -m scripts.dashboards.check [--picture FOLDER]

Needs Prometheus and its Alertmanager (Debian: prometheus, prometheus-alertmanager) and takes some
five minutes. Starts `plait serve` with a small random model and host tiers, lets a real Prometheus
scrape it, loads it with `plait bench`, kills workers, overruns the queue, and then asks every query
of every panel. A second front end, of another model, refuses the same workers. GPU panels are asked
of a page in dcgm-exporter's format with names of its default counters: no GPU is looked at. Exits
with 1 where a panel is empty, an alert of MUST_FIRE does not reach the Alertmanager, or names from
requests become series.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.pull.cache import default_model_path
from scripts.dashboards import trouble
from scripts.dashboards.asked import Query, load, num_numbers, queries_of
from scripts.dashboards.build import DASHBOARDS, RULE_TESTS, RULES
from scripts.dashboards.monitors import (
    SCRAPE_S,
    Alert,
    MissingToolError,
    Monitors,
    monitoring,
    tool,
    until,
)
from tests.served import Served, serving
from tests.tiny import save_dsa_chat

UNDER_LOAD = {
    Alert("plait", "PlaitWorkersLost"),
    Alert("plait", "PlaitRejects"),
    Alert("another", "PlaitWorkersRefused"),
}
NO_PAIR = Alert("plait", "PlaitNoReadyPair")
MUST_FIRE = {*UNDER_LOAD, NO_PAIR}
FLAGS = (
    *("--prefill-max-total-tokens", "1024", "--decode-max-total-tokens", "4096"),
    *("--max-queued-requests", "64", "--max-replays", "20"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "4"),
)
log = Console(stderr=True, highlight=False)


class _Recorded(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = (Path(__file__).parent / "dcgm.prom").read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # who asks on a busy machine may have gone
            self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def recorded_gpus() -> Iterator[str]:
    """host:port of a server of the recorded page."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Recorded)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def go_wrong(served: Served, monitors: Monitors) -> set[Alert]:
    """Load and failures; the alerts that came of them."""
    fleet = trouble.Fleet(served)
    has_come = partial(_has_come, monitors)
    log.print("long prompts, more than the pools hold")
    for part in range(24):
        trouble.ask_long(served, part)
    log.print("plait bench, while workers are killed")
    flags = ["--concurrency", "12", "--num-requests", "400", "--prompt-tokens", "100:300"]
    flags += ["--shared-prefix-tokens", "64", "--output-tokens", "32:64", "--ignore-eos"]
    with trouble.bench(served, *flags):
        trouble.refused(served)
        for role in ("decode", "prefill", "decode", "decode"):
            fleet.kill(role)
            trouble.leave(served)
        num_refused = trouble.overrun(served, 200)
        log.print(f"overrun: {num_refused} of 200 answered 503")
    log.print("waiting for alerts")
    for alert in UNDER_LOAD:
        until(partial(has_come, alert), f"{alert} fires")
    log.print("no decode worker")
    with trouble.without_decode(fleet):
        until(partial(has_come, NO_PAIR), f"{NO_PAIR} fires")
        seen = monitors.alerts()
    until(fleet.is_whole, "all workers are there again")
    return seen


def _has_come(monitors: Monitors, alert: Alert) -> bool:
    return alert in monitors.alerts()


def num_series(monitors: Monitors) -> int:
    (sample,) = monitors.query('count({job="plait"})')
    return int(sample["value"][1])


def with_odd_names(served: Served, monitors: Monitors) -> tuple[int, int]:
    """Series before and after; the first of each kind has made its own by then."""
    trouble.refused(served)
    before = _settled(monitors)
    trouble.odd_names(served)
    return before, _settled(monitors)


def _settled(monitors: Monitors) -> int:
    """The number of series after the next scrapes."""
    seen_at = _last_scrape(monitors)
    until(lambda: _last_scrape(monitors) > seen_at + 2 * SCRAPE_S, "two more scrapes")
    return num_series(monitors)


def _last_scrape(monitors: Monitors) -> float:
    (sample,) = monitors.query('timestamp(up{job="plait"})')
    return float(sample["value"][1])


def report(monitors: Monitors, start_s: float, end_s: float) -> list[Query]:
    """Prints a line a dashboard; the queries that show nothing."""
    empty = []
    table = Table("dashboard", "panels", "queries", "points", "empty")
    for board in DASHBOARDS:
        dashboard = load(board.name)
        queries = list(queries_of(dashboard))
        points = [num_numbers(monitors, query, start_s, end_s) for query in queries]
        nothing = [query for query, num in zip(queries, points, strict=True) if not num]
        empty += nothing
        counts = (len(dashboard["panels"]), len(queries), sum(points), len(nothing))
        table.add_row(dashboard["title"], *map(str, counts))
    Console(width=100, highlight=False).print(table)
    for query in empty:
        print(f"empty: {query.dashboard} / {query.panel} / {query.legend}: {query.expr}")
    # A check that can find nothing empty would be none.
    bad = Query("", "", "", 'sum(rate(plait_nobody_counts_this_total{job=~"plait"}[30s]))')
    assert not num_numbers(monitors, bad, start_s, end_s)
    return empty


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, help="folder for a picture of each dashboard")
    args = parser.parse_args()
    try:
        promtool = tool("promtool")
        subprocess.run([promtool, "check", "rules", RULES], check=True)
        subprocess.run([promtool, "test", "rules", RULE_TESTS], check=True)
        with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
            folder = Path(scratch)
            model = save_dsa_chat(folder / "tiny", default_model_path())
            served = stack.enter_context(serving(model, *FLAGS))
            served.wait_ready()
            targets = {
                "plait": served.url.removeprefix("http://"),
                "gpus": stack.enter_context(recorded_gpus()),
                "another": stack.enter_context(trouble.another_model(served, default_model_path())),
            }
            monitors = stack.enter_context(monitoring(folder, targets, RULES))
            start_s = time.time()
            alerts = go_wrong(served, monitors)
            end_s = time.time()
            log.print(f"{trouble.NUM_ODD} odd names")
            before, after = with_odd_names(served, monitors)
            empty = report(monitors, start_s, end_s)
            if args.picture:
                from scripts.dashboards.picture import draw_all

                draw_all(monitors, args.picture, start_s, end_s)
            served.stop()
    except (MissingToolError, subprocess.CalledProcessError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"alerts that reached the Alertmanager: {', '.join(sorted(map(str, alerts)))}")
    print(f"series before and after {trouble.NUM_ODD} requests with odd names: {before}, {after}")
    is_good = not empty and before == after and alerts >= MUST_FIRE
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
