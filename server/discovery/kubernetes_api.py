"""The Kubernetes API as a pod reaches it: address, token, certificate, namespace.

Reads the credentials anew for each connection, since a cluster replaces them. Knows no resource.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx

from server.options.config import ConfigError

CONNECT_S = 5.0
ANSWER_S = 15.0


class CredentialsError(Exception):
    """The token or the certificate cannot be read; the message says which."""


class KubernetesApi:
    """`url` None: that of the cluster this process runs in. Raises ConfigError outside of one."""

    def __init__(
        self, url: str | None, credentials: Path, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._credentials = credentials.expanduser()
        self._needs_token = url is None
        if url is None:
            host = environment.get("KUBERNETES_SERVICE_HOST")
            if not host:
                raise ConfigError(
                    "--workers k8s://…: this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not"
                    " set); expected --kubernetes-api URL, or addresses as tcp://10.0.0.7:7000"
                )
            port = environment.get("KUBERNETES_SERVICE_PORT") or "443"
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        self.url = url.rstrip("/")

    def namespace(self, place: str) -> str:
        """That this pod runs in, for the item of --workers that names none. Raises ConfigError."""
        path = self._credentials / "namespace"
        try:
            name = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--workers {place}: {path}: {error}; expected k8s://SERVICE.NAMESPACE:PORT where"
                " there is no such file"
            ) from error
        if not name:
            raise ConfigError(f"--workers {place}: {path} is empty; expected a namespace")
        return name

    def connect(self) -> httpx.AsyncClient:
        """With the credentials as they are now. Raises CredentialsError."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers=self._headers(),
            verify=self._tls(),
            trust_env=False,  # a proxy of the environment is for the world outside
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        )

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "plait"}
        path = self._credentials / "token"
        try:
            headers["Authorization"] = f"Bearer {path.read_text(encoding='ascii').strip()}"
        except (OSError, UnicodeDecodeError) as error:
            if self._needs_token or path.exists():
                raise CredentialsError(f"{path}: {error}") from error
        return headers

    def _tls(self) -> ssl.SSLContext:
        if self.url.startswith("http://"):
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not used; the default takes long
        path = self._credentials / "ca.crt"
        try:
            return ssl.create_default_context(cafile=str(path) if path.exists() else None)
        except (OSError, ssl.SSLError) as error:
            raise CredentialsError(f"{path}: {error}") from error
