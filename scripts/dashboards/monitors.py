"""A Prometheus and an Alertmanager of one's own, as processes, and what they are asked.

Knows URLs to scrape and queries; no metric and no dashboard.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

SCRAPE_S = 5
PATIENCE_S = 600.0  # only reached when something hangs
# Debian calls it after the package.
ALERTMANAGER = ("alertmanager", "prometheus-alertmanager")


class MissingToolError(Exception):
    """A program of Prometheus' is not installed."""


def tool(*names: str) -> str:
    """The path of the first that is installed. Raises MissingToolError."""
    for name in names:
        if path := shutil.which(name):
            return path
    raise MissingToolError(
        f"{names[0]} is not installed; on Debian: apt-get install prometheus"
        " prometheus-alertmanager"
    )


def until(holds: Callable[[], bool], what: str) -> None:
    """Looks again and again. Raises TimeoutError, which says what was waited for."""
    ends_at = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Alert:
    job: str  # empty where nothing was scraped
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.job}" if self.job else self.name


@dataclass(frozen=True, slots=True)
class Monitors:
    prometheus: str  # URLs
    alertmanager: str

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[Any]:
        """The series, each with `metric` and `values` [[unix seconds, text]]. Raises ValueError
        where Prometheus refuses the query."""
        where = {"query": expr, "start": start_s, "end": end_s, "step": step_s}
        answer = httpx.get(f"{self.prometheus}/api/v1/query_range", params=where, timeout=60).json()
        if answer["status"] != "success":
            raise ValueError(f"{answer['error']}: {expr}")
        found: list[Any] = answer["data"]["result"]
        return found

    def query(self, expr: str) -> list[Any]:
        """The samples now, each with `metric` and `value` [unix seconds, text]."""
        answer = httpx.get(
            f"{self.prometheus}/api/v1/query", params={"query": expr}, timeout=60
        ).json()
        found: list[Any] = answer["data"]["result"]
        return found

    def alerts(self) -> set[Alert]:
        """Those that have reached the Alertmanager and go on."""
        answer = httpx.get(f"{self.alertmanager}/api/v2/alerts", timeout=60).json()
        labels = [alert["labels"] for alert in answer]
        return {Alert(of.get("job", ""), of["alertname"]) for of in labels}


@contextlib.contextmanager
def monitoring(folder: Path, targets: Mapping[str, str], rules: Path) -> Iterator[Monitors]:
    """Both, scraping `targets` (host:port by job) every SCRAPE_S and ruled by `rules`. Logs and
    data go to `folder`."""
    urls = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    prometheus, alertmanager = urls
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(rules.resolve())],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in targets.items()
        ],
    }
    routes = {"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]}
    # JSON is YAML.
    (folder / "prometheus.yaml").write_text(json.dumps(config))
    (folder / "alertmanager.yaml").write_text(json.dumps(routes))
    commands = (
        [
            tool("prometheus"),
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/series",
            f"--web.listen-address={prometheus}",
        ],
        [
            tool(*ALERTMANAGER),
            f"--config.file={folder}/alertmanager.yaml",
            f"--storage.path={folder}/alerts",
            f"--web.listen-address={alertmanager}",
            "--cluster.listen-address=",
        ],
    )
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((folder / f"{Path(command[0]).name}.log").open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for url in urls:
            until(lambda url=url: _is_ready(url), f"http://{url} is ready")  # type: ignore[misc]
        yield Monitors(f"http://{prometheus}", f"http://{alertmanager}")


def _is_ready(address: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://{address}/-/ready", timeout=10).status_code == 200
    return False
