"""What scripts/run_chart makes of the rendered chart; starting it takes a container engine."""

from __future__ import annotations

import pytest

from scripts.run_chart.containers import Engine, in_bytes, in_cores, run_flags, words
from scripts.run_chart.manifests import ManifestError, Release, parse, render
from tests.helm.chart import CHART, EXAMPLES, helm

ADDRESS = "10.9.8.7"


@pytest.fixture(scope="module")
def text() -> str:
    options = ["--values", str(EXAMPLES["cpu-demo"]), "--set", "discovery=static"]
    return render(helm(), "rel", str(CHART), options)


@pytest.fixture(scope="module")
def release(text: str) -> Release:
    return parse(text)


def test_pods_are_found_with_their_services(release: Release) -> None:
    selected = {
        (service.name, pod.name)
        for service in release.services
        for pod in release.pods
        if service.selects(pod)
    }
    assert selected == {
        ("rel-plait", "rel-plait-frontend-0"),
        ("rel-plait-prefill", "rel-plait-prefill-0"),
        ("rel-plait-decode", "rel-plait-decode-0"),
    }
    assert [service.name for service in release.services if not service.is_headless] == [
        "rel-plait"
    ]


def test_arguments_and_variables_hold_the_pods_address(release: Release) -> None:
    decode = next(p for p in release.pods if p.workload.endswith("decode")).at(ADDRESS).main
    assert f"--listen=tcp://{ADDRESS}:7000" in decode.args
    assert decode.env["POD_IP"] == ADDRESS
    assert not [word for word in words(decode) if "$(" in word]


def test_a_container_is_as_locked_down_as_the_manifest_says(release: Release) -> None:
    for pod in release.pods:
        flags = run_flags(Engine("docker", "net", "10.9.8.0/24"), pod, pod.main, [])
        joined = " ".join(flags)
        assert "--read-only" in flags
        assert "--user 10001:10001" in joined and "--cap-drop ALL" in joined
        assert f"--memory {in_bytes(pod.main.limits['memory'])}" in joined


def test_each_pod_has_the_three_probes(release: Release) -> None:
    for pod in release.pods:
        paths = {kind: probe.path for kind, probe in pod.main.probes.items()}
        assert paths == {"startup": "/health", "liveness": "/live", "readiness": "/ready"}
        assert {probe.port for probe in pod.main.probes.values()} <= set(pod.main.ports.values())


def test_workers_serve_on_for_a_while_before_sigterm(release: Release) -> None:
    hooks = {pod.workload.rpartition("-")[2]: pod.main.pre_stop for pod in release.pods}
    assert hooks == {"frontend": [], "prefill": ["sleep", "5"], "decode": ["sleep", "5"]}


def test_what_cannot_be_run_as_in_a_cluster_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match="tty"):
        parse(
            text.replace(
                "          imagePullPolicy:", "          tty: true\n          imagePullPolicy:"
            )
        )
    with pytest.raises(ManifestError, match=r"spec\.nodeName"):
        parse(text.replace("status.podIP", "spec.nodeName"))
    with pytest.raises(ManifestError, match="no-such-key"):
        render(helm(), "rel", str(CHART), ["--set", "no-such-key=1"])


def test_quantities() -> None:
    assert [in_bytes(q) for q in ("512Mi", "2Gi", "1G", "7")] == [2**29, 2**31, 10**9, 7]
    assert [in_cores(q) for q in ("250m", "2", 1)] == [0.25, 2.0, 1.0]
