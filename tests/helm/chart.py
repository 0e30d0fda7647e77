"""The chart as helm renders it: manifests of an example or of values, parsed."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
RELEASE, NAMESPACE = "rel", "space"
APIS = (
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
)

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where it is there

Manifest = dict[str, Any]


@functools.cache
def helm() -> str:
    """PATH's helm, or the one that scripts/helm.sh fetches."""
    done = subprocess.run(
        [ROOT / "scripts" / "helm.sh"], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *argv], input=stdin, capture_output=True, text=True)


@dataclass(frozen=True)
class Rendered:
    """What a release would consist of."""

    manifests: tuple[Manifest, ...]

    def of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def get(self, kind: str, name: str) -> Manifest:
        """The one of that name, given without the release's."""
        full = f"{RELEASE}-plait-{name}".rstrip("-")
        (found,) = [m for m in self.of(kind) if m["metadata"]["name"] == full]
        return found

    def workload(self, role: str) -> Manifest:
        return self.get("Deployment" if role == "frontend" else "StatefulSet", role)

    def pod(self, role: str) -> Manifest:
        return self.workload(role)["spec"]["template"]

    def container(self, role: str) -> Manifest:
        (container,) = self.pod(role)["spec"]["containers"]
        return container

    def pods(self) -> list[Manifest]:
        """Metadata and spec of every pod there would be, the test's included."""
        workloads = [*self.of("Deployment"), *self.of("StatefulSet")]
        return [m["spec"]["template"] for m in workloads] + self.of("Pod")


def template(values: Mapping[str, Any], *flags: str) -> subprocess.CompletedProcess[str]:
    argv = ["template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", "-"]
    return run(*argv, *flags, stdin=json.dumps(values))


@functools.cache
def _render(values: str, flags: tuple[str, ...]) -> Rendered:
    done = template(json.loads(values), *flags)
    assert done.returncode == 0, done.stderr
    loaded = yaml.load_all(done.stdout, LOADER)
    return Rendered(tuple(m for m in loaded if m))


def render(values: Mapping[str, Any] | None = None, *flags: str) -> Rendered:
    return _render(json.dumps(values or {}), flags)


def render_example(name: str) -> Rendered:
    apis = [part for api in APIS for part in ("--api-versions", api)]
    return render(yaml.safe_load(EXAMPLES[name].read_text(encoding="utf-8")), *apis)
