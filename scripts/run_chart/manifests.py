"""A rendered chart as values: what the runner starts, in Kubernetes' words. Knows no engine.

Reads the part of the API that plait's chart uses; a container's field that it does not know is an
error, not overlooked.
"""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

WORKLOADS = ("Deployment", "StatefulSet")
# Fields of a container that are taken up below, or that only concern a cluster.
KNOWN = {
    "args", "command", "env", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name",
    "ports", "readinessProbe", "resources", "securityContext", "startupProbe", "volumeMounts",
}  # fmt: skip


class ManifestError(Exception):
    """The chart holds something that cannot be run as it would be in a cluster."""


@dataclass(frozen=True, slots=True)
class Probe:
    kind: str  # startup, liveness, readiness
    path: str
    port: int
    period_s: float
    timeout_s: float
    failures: int  # in a row that count


@dataclass(frozen=True, slots=True)
class Container:
    name: str
    image: str
    command: list[str]  # empty: the image's entry point
    args: list[str]
    env: dict[str, str]
    ports: dict[str, int]
    probes: dict[str, Probe]
    pre_stop: list[str]
    limits: dict[str, str]
    requests: dict[str, str]
    security: dict[str, Any]
    mounts: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    workload: str
    labels: dict[str, str]
    subdomain: str | None  # of a StatefulSet's headless service
    grace_s: float
    security: dict[str, Any]
    volumes: dict[str, dict[str, Any]]
    init: list[Container]
    main: Container

    def at(self, address: str) -> Pod:
        """This pod where it has that address: variables and $(NAME) in arguments filled in."""
        return replace(
            self,
            init=[_expanded(container, address) for container in self.init],
            main=_expanded(self.main, address),
        )


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    selector: dict[str, str]
    is_headless: bool
    ports: dict[int, str | int]  # port: target

    def selects(self, pod: Pod) -> bool:
        return self.selector.items() <= pod.labels.items()


@dataclass(frozen=True, slots=True)
class Release:
    pods: list[Pod]
    services: list[Service]
    secrets: dict[str, dict[str, bytes]]
    config_maps: dict[str, dict[str, bytes]]
    kinds_left_out: list[str]


def render(helm: str, release: str, chart: str, options: Sequence[str]) -> str:
    """What `helm template` prints. Raises ManifestError with helm's own words."""
    command = [helm, "template", release, chart, *options]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise ManifestError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def parse(text: str) -> Release:
    documents = [d for d in yaml.safe_load_all(text) if d]
    # Hooks are helm's to run, `helm test` among them.
    documents = [
        d for d in documents if "helm.sh/hook" not in (d["metadata"].get("annotations") or {})
    ]
    pods = [pod for d in documents if d["kind"] in WORKLOADS for pod in _pods(d)]
    taken = {*WORKLOADS, "Service", "Secret", "ConfigMap"}
    return Release(
        pods=pods,
        services=[_service(d) for d in documents if d["kind"] == "Service"],
        secrets={d["metadata"]["name"]: _data(d) for d in documents if d["kind"] == "Secret"},
        config_maps={
            d["metadata"]["name"]: _data(d) for d in documents if d["kind"] == "ConfigMap"
        },
        kinds_left_out=sorted({d["kind"] for d in documents} - taken),
    )


def _data(document: Mapping[str, Any]) -> dict[str, bytes]:
    encoded = document.get("data") or {}
    is_secret = document["kind"] == "Secret"
    found = {k: base64.b64decode(v) if is_secret else v.encode() for k, v in encoded.items()}
    return found | {k: v.encode() for k, v in (document.get("stringData") or {}).items()}


def _service(document: Mapping[str, Any]) -> Service:
    spec = document["spec"]
    return Service(
        name=document["metadata"]["name"],
        selector=spec["selector"],
        is_headless=spec.get("clusterIP") == "None",
        ports={p["port"]: p.get("targetPort", p["port"]) for p in spec["ports"]},
    )


def _pods(document: Mapping[str, Any]) -> list[Pod]:
    spec, name = document["spec"], document["metadata"]["name"]
    template = spec["template"]["spec"]
    if len(template["containers"]) != 1:
        raise ManifestError(f"{name}: has several containers; expected one")
    pod = Pod(
        name=name,
        workload=name,
        labels=spec["template"]["metadata"]["labels"],
        subdomain=spec.get("serviceName"),
        grace_s=template.get("terminationGracePeriodSeconds", 30),
        security=template.get("securityContext") or {},
        volumes={volume["name"]: volume for volume in template.get("volumes") or []},
        init=[_container(c) for c in template.get("initContainers") or []],
        main=_container(template["containers"][0]),
    )
    return [replace(pod, name=f"{name}-{i}") for i in range(spec.get("replicas", 1))]


def _container(spec: Mapping[str, Any]) -> Container:
    if unknown := set(spec) - KNOWN:
        raise ManifestError(f"container {spec['name']}: {', '.join(sorted(unknown))} is unknown")
    ports = {port["name"]: port["containerPort"] for port in spec.get("ports") or []}
    probes = {
        kind: _probe(kind, probe, ports)
        for kind in ("startup", "liveness", "readiness")
        if (probe := spec.get(f"{kind}Probe"))
    }
    resources = spec.get("resources") or {}
    hook = (spec.get("lifecycle") or {}).get("preStop") or {"exec": {"command": []}}
    return Container(
        name=spec["name"],
        image=spec["image"],
        command=spec.get("command") or [],
        args=[str(arg) for arg in spec.get("args") or []],
        env={entry["name"]: _value(entry) for entry in spec.get("env") or []},
        ports=ports,
        probes=probes,
        pre_stop=hook["exec"]["command"],
        limits=resources.get("limits") or {},
        requests=resources.get("requests") or {},
        security=spec.get("securityContext") or {},
        mounts=spec.get("volumeMounts") or [],
    )


def _value(entry: Mapping[str, Any]) -> str:
    """A variable's value; the pod's address as $(address), to be filled in by Pod.at."""
    source = entry.get("valueFrom")
    if source is None:
        return str(entry.get("value", ""))
    if (source.get("fieldRef") or {}).get("fieldPath") == "status.podIP":
        return "$(address)"
    raise ManifestError(f"variable {entry['name']}: {source} is unknown; expected status.podIP")


def _probe(kind: str, spec: Mapping[str, Any], ports: Mapping[str, int]) -> Probe:
    if "httpGet" not in spec:
        raise ManifestError(f"{kind}Probe: {spec} is unknown; expected httpGet")
    port = spec["httpGet"]["port"]
    return Probe(
        kind=kind,
        path=spec["httpGet"]["path"],
        port=ports[port] if isinstance(port, str) else port,
        period_s=spec.get("periodSeconds", 10),
        timeout_s=spec.get("timeoutSeconds", 1),
        failures=spec.get("failureThreshold", 3),
    )


def _expanded(container: Container, address: str) -> Container:
    env: dict[str, str] = {}

    def fill(text: str) -> str:
        return re.sub(r"\$\(([\w.]+)\)", lambda m: env.get(m[1], m[0]), text)

    env["address"] = address
    for name, value in container.env.items():
        env[name] = fill(value)
    args, command = [fill(a) for a in container.args], [fill(a) for a in container.command]
    del env["address"]
    return replace(container, env=env, args=args, command=command)
