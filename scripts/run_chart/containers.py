"""Pods as containers of docker or podman: what a manifest asks for in the engine's flags, and the
folders that stand for volumes. Knows no probes and decides nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.run_chart.manifests import Container, ManifestError, Pod, Release

_SIZES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}


class EngineError(Exception):
    """The engine refused; the message has its command and its words."""


class Engine:
    """One network's containers, all named after it."""

    def __init__(self, command: str, network: str, subnet: str) -> None:
        self.command = command
        self.network = network
        self._prefix = subnet.rpartition(".")[0]
        self._subnet = subnet
        self._num_addresses = 9  # below: the gateway's, and room

    @property
    def gateway(self) -> str:
        return f"{self._prefix}.1"

    def new_address(self) -> str:
        self._num_addresses += 1
        return f"{self._prefix}.{self._num_addresses}"

    async def __call__(self, *args: str) -> str:
        """The standard output of a command. Raises EngineError."""
        process = await asyncio.create_subprocess_exec(
            self.command, *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, error = await process.communicate()
        if process.returncode != 0:
            raise EngineError(f"{self.command} {' '.join(args)}: {error.decode().strip()}")
        return out.decode().strip()

    async def open(self) -> None:
        gateway = ("--gateway", self.gateway)
        await self("network", "create", "--subnet", self._subnet, *gateway, self.network)

    async def close(self) -> None:
        await self("network", "rm", self.network)


class Volumes:
    """Folders for claims, secrets, config maps and emptyDirs, owned as the kubelet has it."""

    def __init__(self, root: Path, release: Release, claims: dict[str, Path]) -> None:
        self._root = root
        self._release = release
        self._claims = claims

    def flags(self, pod: Pod, container: Container) -> list[str]:
        found: list[str] = []
        for mount in container.mounts:
            volume, path = pod.volumes[mount["name"]], mount["mountPath"]
            empty = volume.get("emptyDir")
            if empty is not None and empty.get("medium") == "Memory":
                size = f"size={in_bytes(empty['sizeLimit'])}," if "sizeLimit" in empty else ""
                found += ["--tmpfs", f"{path}:{size}mode=1777"]
                continue
            is_read_only = mount.get("readOnly") or "secret" in volume or "configMap" in volume
            source = self._folder(pod, volume)
            found += ["--volume", f"{source}:{path}:{'ro' if is_read_only else 'rw'}"]
        return found

    def _folder(self, pod: Pod, volume: dict[str, Any]) -> Path:
        group = pod.security.get("fsGroup", 0)
        if claim := volume.get("persistentVolumeClaim"):
            name = str(claim["claimName"])
            folder = self._claims.get(name) or self._root / "claims" / name
        elif "emptyDir" in volume:
            folder = self._root / "pods" / pod.name / volume["name"]
        elif source := volume.get("secret"):
            return self._files(pod, volume, self._release.secrets[source["secretName"]], source)
        elif source := volume.get("configMap"):
            return self._files(pod, volume, self._release.config_maps[source["name"]], source)
        else:
            raise ManifestError(f"volume {volume} is unknown")
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, -1, group)
        folder.chmod(0o2775)
        return folder

    def _files(
        self, pod: Pod, volume: dict[str, Any], data: dict[str, bytes], source: dict[str, Any]
    ) -> Path:
        folder = self._root / "pods" / pod.name / str(volume["name"])
        folder.mkdir(parents=True, exist_ok=True)
        names = {item["key"]: item["path"] for item in source.get("items") or []}
        for key, content in data.items():
            if names and key not in names:
                continue
            file = folder / names.get(key, key)
            file.write_bytes(content)
            os.chown(file, 0, pod.security.get("fsGroup", 0))
            file.chmod(source.get("defaultMode", 0o644))
        return folder


def run_flags(engine: Engine, pod: Pod, container: Container, aliases: Sequence[str]) -> list[str]:
    """Everything of `run` but the volumes, the address and the image."""
    security = {**pod.security, **container.security}
    user = f"{security.get('runAsUser', 0)}:{security.get('runAsGroup', 0)}"
    flags = ["--network", engine.network, "--hostname", pod.name, "--user", user]
    for alias in aliases:
        flags += ["--network-alias", alias]
    if "fsGroup" in security:
        flags += ["--group-add", str(security["fsGroup"])]
    if security.get("readOnlyRootFilesystem"):
        flags += ["--read-only"]
    if security.get("allowPrivilegeEscalation") is False:
        flags += ["--security-opt", "no-new-privileges"]
    for name in (security.get("capabilities") or {}).get("drop") or []:
        flags += ["--cap-drop", name]
    for name in (security.get("capabilities") or {}).get("add") or []:
        flags += ["--cap-add", name]
    if "memory" in container.limits:
        flags += ["--memory", str(in_bytes(container.limits["memory"]))]
    if "cpu" in container.limits:
        flags += ["--cpus", str(in_cores(container.limits["cpu"]))]
    if "cpu" in container.requests:
        flags += ["--cpu-shares", str(max(2, int(1024 * in_cores(container.requests["cpu"]))))]
    for name, value in container.env.items():
        flags += ["--env", f"{name}={value}"]
    if container.command:
        flags += ["--entrypoint", container.command[0]]
    return flags


def words(container: Container) -> list[str]:
    """What follows the image's name."""
    return [*container.command[1:], *container.args]


def in_bytes(quantity: str | int) -> int:
    """A quantity of Kubernetes, as 512Mi."""
    text = str(quantity)
    unit = next((u for u in _SIZES if text.endswith(u)), "")
    return int(float(text.removesuffix(unit)) * _SIZES.get(unit, 1))


def in_cores(quantity: str | int) -> float:
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
