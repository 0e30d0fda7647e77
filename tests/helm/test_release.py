"""What a release is made of: probes, ends, secrets, rights, networks, GPUs, scaling."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.cluster_key import ClusterKey
from tests.helm.chart import APIS, CHART, EXAMPLES, Manifest, Rendered, render, render_example, run

ROLES = ("frontend", "prefill", "decode")
PROBES = {"startupProbe": "/health", "livenessProbe": "/live", "readinessProbe": "/ready"}
Values = dict[str, Any]


@pytest.fixture(scope="module", params=["defaults", *EXAMPLES])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render() if request.param == "defaults" else render_example(request.param)


def flag(container: Manifest, name: str) -> str:
    (value,) = [arg.partition("=")[2] for arg in container["args"] if arg.startswith(f"{name}=")]
    return str(value)


@pytest.mark.parametrize("role", ROLES)
def test_three_probes_ask_three_endpoints(rendered: Rendered, role: str) -> None:
    container = rendered.container(role)
    port = "http" if role == "frontend" else "health"
    assert port in {p["name"] for p in container["ports"]}
    for probe, path in PROBES.items():
        assert container[probe]["httpGet"] == {"path": path, "port": port}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


def delay_of(container: Manifest) -> float:
    """Seconds between a pod's end being asked for and its drain: a front end has a flag for it."""
    if "lifecycle" not in container:
        return float(flag(container, "--drain-delay-s"))
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    return float(seconds)


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_has_time_to_drain(rendered: Rendered, role: str) -> None:
    container = rendered.container(role)
    delay_s = delay_of(container)
    assert delay_s > 0
    drain_s = float(flag(container, "--drain-timeout-s"))
    grace_s = rendered.pod(role)["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= delay_s + drain_s + 15  # a group's ranks, a front end's last bytes


def test_drain_options_reach_flags_and_grace_period() -> None:
    found = render({"drain": {"timeoutSeconds": 900, "delaySeconds": 10}})
    for role in ROLES:
        container = found.container(role)
        assert flag(container, "--drain-timeout-s") == "900"
        assert delay_of(container) == 10
        assert found.pod(role)["spec"]["terminationGracePeriodSeconds"] >= 925


def test_every_container_is_confined(rendered: Rendered) -> None:
    for pod in rendered.pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for forbidden in ("hostNetwork", "hostPID", "hostIPC"):
            assert forbidden not in spec
        assert not any("hostPath" in volume for volume in spec["volumes"])
        # Else a service called `plait` sets PLAIT_PORT=tcp://…
        assert spec["enableServiceLinks"] is False
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {"/tmp", "/var/lib/plait"} <= mounts


def test_capabilities_are_added_for_rdma_only() -> None:
    plain, rdma = render(), render_example("multi-host")
    for role in ("prefill", "decode"):
        assert "add" not in plain.container(role)["securityContext"]["capabilities"]
        container = rdma.container(role)
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert container["resources"]["limits"]["rdma/hca"] == 1
    assert "add" not in rdma.container("frontend")["securityContext"]["capabilities"]


def test_every_mount_has_its_volume(rendered: Rendered) -> None:
    for pod in rendered.pods():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        mounted = {mount["name"] for c in containers for mount in c["volumeMounts"]}
        assert mounted == volumes


def test_secrets_are_mounted_and_never_inlined(rendered: Rendered) -> None:
    secrets = {m["metadata"]["name"]: m["data"] for m in rendered.of("Secret")}
    everything_else = yaml.safe_dump_all(m for m in rendered.manifests if m["kind"] != "Secret")
    for data in secrets.values():
        for value in data.values():
            assert value not in everything_else
            assert base64.b64decode(value).decode() not in everything_else
    for pod in rendered.pods():
        for container in pod["spec"]["containers"]:
            assert not any("secretKeyRef" in str(v) for v in container.get("env", []))
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                # plait refuses a key that everybody may read
                assert volume["secret"]["defaultMode"] == 0o440
    for role in ROLES:
        container = rendered.container(role)
        folder, _, file = flag(container, "--cluster-key-file").rpartition("/")
        (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == folder]
        (volume,) = [v for v in rendered.pod(role)["spec"]["volumes"] if v["name"] == mount["name"]]
        assert [item["path"] for item in volume["secret"]["items"]] == [file]


def test_api_keys_are_the_front_ends_alone() -> None:
    found = render()
    assert flag(found.container("frontend"), "--api-key-file") == "/etc/plait/api-keys/keys"
    for role in ("prefill", "decode"):
        assert "api-keys" not in yaml.safe_dump(found.pod(role))
    without = render({"apiKeys": {"required": False}})
    assert "api-key" not in yaml.safe_dump(without.pod("frontend"))
    assert [m["metadata"]["name"] for m in without.of("Secret")] == ["rel-plait-cluster-key"]


def test_the_key_that_the_chart_makes_is_one(tmp_path: Path) -> None:
    secret = render().get("Secret", "cluster-key")
    path = tmp_path / "key"
    path.write_bytes(base64.b64decode(secret["data"]["cluster.key"]))
    path.chmod(0o440)
    assert len(ClusterKey.read(path).public) == 40


def test_secrets_of_ones_own_are_used_and_none_is_made() -> None:
    found = render_example("multi-host")
    assert not found.of("Secret")
    volumes = {v["name"]: v for v in found.pod("frontend")["spec"]["volumes"]}
    assert volumes["api-keys"]["secret"]["secretName"] == "plait-clients"
    assert volumes["cluster-key"]["secret"]["secretName"] == "plait-cluster"


@pytest.mark.parametrize("discovery", ["kubernetes", "dns", "static"])
def test_rights_exist_with_discovery_only(discovery: str) -> None:
    found = render({"discovery": discovery, "prefill": {"groups": 2}})
    workers = flag(found.container("frontend"), "--workers").split(",")
    spec = found.pod("frontend")["spec"]
    assert spec["automountServiceAccountToken"] is (discovery == "kubernetes")
    for role in ("prefill", "decode"):
        assert found.pod(role)["spec"]["automountServiceAccountToken"] is False
    assert all(m["automountServiceAccountToken"] is False for m in found.of("ServiceAccount"))
    not_ready = {
        found.get("Service", role)["spec"]["publishNotReadyAddresses"]
        for role in ("prefill", "decode")
    }
    assert not_ready == {discovery == "static"}
    assert not found.of("ClusterRole") and not found.of("ClusterRoleBinding")
    if discovery == "kubernetes":
        assert workers == ["k8s://rel-plait-decode:control", "k8s://rel-plait-prefill:control"]
        (role,) = found.of("Role")
        assert role["rules"] == [
            {
                "apiGroups": ["discovery.k8s.io"],
                "resources": ["endpointslices"],
                "verbs": ["list", "watch"],
            }
        ]
        (binding,) = found.of("RoleBinding")
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert [s["name"] for s in binding["subjects"]] == [spec["serviceAccountName"]]
        return
    assert not found.of("Role") and not found.of("RoleBinding")
    assert (
        workers
        == {
            "dns": ["dns://rel-plait-decode:7000", "dns://rel-plait-prefill:7000"],
            "static": [
                "tcp://rel-plait-decode-0.rel-plait-decode:7000",
                "tcp://rel-plait-prefill-0.rel-plait-prefill:7000",
                "tcp://rel-plait-prefill-1.rel-plait-prefill:7000",
            ],
        }[discovery]
    )


def test_accounts_are_those_that_pods_run_as(rendered: Rendered) -> None:
    accounts = {m["metadata"]["name"] for m in rendered.of("ServiceAccount")}
    assert {pod["spec"]["serviceAccountName"] for pod in rendered.pods()} == accounts


def peers(policy: Manifest, direction: str) -> dict[Any, set[str]]:
    """By port or range: the components that may come, or that may be gone to; * is anybody."""
    side = "from" if direction == "ingress" else "to"
    found: dict[Any, set[str]] = {}
    for rule in policy["spec"].get(direction, []):
        names = {
            peer.get("podSelector", {})
            .get("matchLabels", {})
            .get("app.kubernetes.io/component", "others")
            for peer in rule.get(side, [])
        } or {"*"}
        for port in rule["ports"]:
            found.setdefault((port["port"], port.get("endPort")), set()).update(names)
    return found


def test_networks_are_closed_but_for_what_plait_needs() -> None:
    found = render({"model": {"source": "claim", "claim": {"name": "models"}}, "discovery": "dns"})
    policies = {
        m["metadata"]["name"].removeprefix("rel-plait-"): m for m in found.of("NetworkPolicy")
    }
    default = policies["default"]["spec"]
    assert default["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/name": "plait",
        "app.kubernetes.io/instance": "rel",
    }
    assert set(default["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in default
    assert peers(policies["default"], "egress") == {(53, None): {"*"}}
    assert peers(policies["frontend"], "ingress") == {("http", None): {"others", "test"}}
    assert peers(policies["frontend"], "egress") == {(7000, None): {"prefill", "decode"}}
    assert peers(policies["prefill"], "ingress") == {
        ("control", None): {"frontend", "decode"},
        ("health", None): {"others"},
    }
    assert peers(policies["prefill"], "egress") == {(15000, 17000): {"decode"}}
    assert peers(policies["decode"], "ingress") == {
        ("control", None): {"frontend"},
        (15000, 17000): {"prefill"},
        ("health", None): {"others"},
    }
    assert peers(policies["decode"], "egress") == {(7000, None): {"prefill"}}
    assert peers(policies["test"], "egress") == {(8000, None): {"frontend"}}
    for name in ("frontend", "prefill", "decode", "test"):
        labels = policies[name]["spec"]["podSelector"]["matchLabels"]
        assert labels["app.kubernetes.io/component"] == name


def test_nobody_means_nobody() -> None:
    """An empty `from` would let everybody in."""
    found = render({"networkPolicy": {"clients": [], "scrapers": []}})
    for policy in found.of("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            assert rule["from"]
    frontend = found.get("NetworkPolicy", "frontend")
    assert peers(frontend, "ingress") == {("http", None): {"test"}}


def test_the_api_server_and_the_hub_are_reached_where_they_are_needed() -> None:
    found = render()
    assert (443, None) in peers(found.get("NetworkPolicy", "default"), "egress")
    assert (6443, None) in peers(found.get("NetworkPolicy", "frontend"), "egress")
    assert not render({"networkPolicy": {"enabled": False}}).of("NetworkPolicy")


def test_the_transfers_ports_are_those_of_the_policy() -> None:
    found = render({"transfer": {"minPort": 20000, "maxPort": 20100}})
    env = {v["name"]: v.get("value") for v in found.container("decode")["env"]}
    assert (env["MC_MIN_RPC_PORT"], env["MC_MAX_RPC_PORT"]) == ("20000", "20100")
    assert (20000, 20100) in peers(found.get("NetworkPolicy", "decode"), "ingress")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_group_has_a_gpu_for_each_rank(name: str) -> None:
    values = yaml.safe_load(EXAMPLES[name].read_text(encoding="utf-8"))
    found = render_example(name)
    cp_size = values["prefill"]["cpSize"]
    assert flag(found.container("prefill"), "--prefill-cp-size") == str(cp_size)
    gpus = {
        role: found.container(role)["resources"]["limits"].get("nvidia.com/gpu") for role in ROLES
    }
    if values["accelerator"]["kind"] == "none":
        assert set(gpus.values()) == {None}
        assert flag(found.container("decode"), "--device") == "cpu"
    else:
        assert gpus == {"frontend": None, "prefill": cp_size, "decode": 1}
        assert cp_size <= values["accelerator"]["perHost"]
        assert flag(found.container("decode"), "--device") == "cuda"


def test_as_many_pods_as_groups_and_workers() -> None:
    found = render(
        {"prefill": {"groups": 3}, "decode": {"workers": 5}, "frontend": {"replicas": 4}}
    )
    assert [found.workload(role)["spec"]["replicas"] for role in ROLES] == [4, 3, 5]


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_scaling_aims_at_what_it_scales(kind: str) -> None:
    found = render({role: {"autoscaling": {"kind": kind}} for role in ROLES})
    documented = (CHART.parent / "docs" / "observe.md").read_text(encoding="utf-8")
    for role in ROLES:
        assert "replicas" not in found.workload(role)["spec"]  # else each upgrade undoes it
        scaler = found.get("HorizontalPodAutoscaler" if kind == "hpa" else "ScaledObject", role)
        target = scaler["spec"]["scaleTargetRef"]
        workload = found.workload(role)
        assert (target["kind"], target["name"]) == (workload["kind"], workload["metadata"]["name"])
        for metric in scaler["spec"].get("metrics", []):
            if metric["type"] == "Pods":
                assert f"`{metric['pods']['metric']['name']}`" in documented
        for trigger in scaler["spec"].get("triggers", []):
            assert 'pod=~"rel-plait-' in trigger["metadata"]["query"]
    assert not render().of("HorizontalPodAutoscaler")


def test_scaling_keeps_to_the_longest_period_that_kubernetes_takes() -> None:
    found = render({"drain": {"timeoutSeconds": 7200}, "decode": {"autoscaling": {"kind": "hpa"}}})
    (scaler,) = found.of("HorizontalPodAutoscaler")
    (policy,) = scaler["spec"]["behavior"]["scaleDown"]["policies"]
    assert policy["periodSeconds"] == 1800


def test_names_that_yaml_takes_for_something_else_stay_text() -> None:
    values = {
        "fullnameOverride": "on",
        "nameOverride": "1e3",
        "apiKeys": {"secretKey": "null", "existingSecret": "123"},
        "clusterKey": {"secretKey": "12", "existingSecret": ""},
        "model": {"servedName": "GLM: 5 #1", "source": "claim", "claim": {"name": "7"}},
        "frontend": {"priorityClassName": "no"},
    }
    argv = ["template", "123", str(CHART), "--namespace", "456", "--values", "-"]
    done = run(*argv, stdin=json.dumps(values))
    assert done.returncode == 0, done.stderr
    manifests = [m for m in yaml.safe_load_all(done.stdout) if m]
    for manifest in manifests:
        metadata = manifest["metadata"]
        texts = [metadata["name"], metadata["namespace"], *metadata["labels"].values()]
        assert all(isinstance(text, str) for text in texts), texts
        assert metadata["labels"]["app.kubernetes.io/instance"] == "123"
    (deployment,) = [m for m in manifests if m["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    assert spec["priorityClassName"] == "no"
    assert flag(spec["containers"][0], "--served-model-name") == "GLM: 5 #1"
    of = {volume["name"]: volume for volume in spec["volumes"]}
    assert of["models"]["persistentVolumeClaim"]["claimName"] == "7"
    assert of["api-keys"]["secret"]["secretName"] == "123"
    assert of["api-keys"]["secret"]["items"] == [{"key": "null", "path": "keys"}]
    (secret,) = [m for m in manifests if m["kind"] == "Secret"]
    assert list(secret["data"]) == ["12"]


def test_a_monitor_sends_the_key_that_metrics_need() -> None:
    guarded = {"frontend": {"options": {"metrics_need_key": True}}}
    found = render(guarded, "--api-versions", APIS[0])
    (endpoint,) = found.get("PodMonitor", "frontend")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {
        "name": "rel-plait-api-keys",
        "key": "api-keys",
    }
    (endpoint,) = found.get("PodMonitor", "workers")["spec"]["podMetricsEndpoints"]
    assert "authorization" not in endpoint  # port 7001 has no keys


def test_a_large_target_is_written_as_a_number() -> None:
    scaling = {"kind": "hpa", "waitingTokens": 2_000_000}
    found = render({"prefill": {"autoscaling": scaling}})
    (metric,) = found.get("HorizontalPodAutoscaler", "prefill")["spec"]["metrics"]
    assert metric["pods"]["target"]["averageValue"] == "2000000"


def test_monitors_come_with_the_kinds_that_the_cluster_knows() -> None:
    assert not render().of("PodMonitor")
    assert not render({"monitoring": {"podMonitors": "never"}}, "--api-versions", APIS[0]).of(
        "PodMonitor"
    )
    found = render(None, "--api-versions", APIS[0])
    for name, port, roles in (
        ("frontend", "http", {"frontend"}),
        ("workers", "health", {"prefill", "decode"}),
    ):
        monitor = found.get("PodMonitor", name)["spec"]
        (endpoint,) = monitor["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == (port, "/metrics")
        assert monitor["jobLabel"] in found.pod("decode")["metadata"]["labels"]
        wanted = monitor["selector"]["matchLabels"].items()
        among = monitor["selector"].get("matchExpressions", [{"values": list(roles)}])[0]["values"]
        chosen = {
            labels["app.kubernetes.io/component"]
            for pod in found.pods()
            if wanted <= (labels := pod["metadata"]["labels"]).items()
            and labels["app.kubernetes.io/component"] in among
        }
        assert chosen == roles
        assert all(port in {p["name"] for p in found.container(role)["ports"]} for role in roles)


def test_monitors_count_nothing_twice() -> None:
    """Front ends relay workers' metrics with a `worker` label; workers' own have none."""
    found = render(None, "--api-versions", APIS[0])
    (own,) = found.get("PodMonitor", "frontend")["spec"]["podMetricsEndpoints"]
    assert own["metricRelabelings"] == [
        {"sourceLabels": ["worker"], "regex": ".+", "action": "drop"}
    ]
    (workers,) = found.get("PodMonitor", "workers")["spec"]["podMetricsEndpoints"]
    assert workers["relabelings"][0]["targetLabel"] == "worker"


def test_rules_and_dashboards_are_the_files_beside_the_chart() -> None:
    found = render({"monitoring": {"rules": "always", "dashboards": True}})
    rules = sorted((CHART / "alerts").glob("*.yaml"))
    boards = sorted((CHART / "dashboards").glob("*.json"))
    assert [m["spec"] for m in found.of("PrometheusRule")] == [
        yaml.safe_load(path.read_text(encoding="utf-8")) for path in rules
    ]
    maps = found.of("ConfigMap")
    assert [m["data"] for m in maps] == [
        {path.name: path.read_text(encoding="utf-8")} for path in boards
    ]
    assert all(m["metadata"]["labels"]["grafana_dashboard"] == "1" for m in maps)


@pytest.mark.parametrize(
    ("model", "folder", "claim"),
    [
        ({"id": "owner/name"}, "owner/name", None),
        ({"id": "owner/name", "pull": {"volume": "claim"}}, "owner/name", "rel-plait-models"),
        ({"id": "m", "source": "claim", "claim": {"name": "mine"}}, "/models/m", "mine"),
    ],
)
def test_models_come_from_the_hub_or_from_a_claim(
    model: Values, folder: str, claim: str | None
) -> None:
    found = render({"model": model})
    for role in ROLES:
        container, spec = found.container(role), found.pod(role)["spec"]
        assert flag(container, "--model") == folder
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "models"]
        assert mount["readOnly"] is True
        (volume,) = [v for v in spec["volumes"] if v["name"] == "models"]
        assert volume.get("persistentVolumeClaim", {}).get("claimName") == claim
        pulls = [c["args"] for c in spec.get("initContainers", [])]
        assert pulls == ([] if model.get("source") == "claim" else [["pull", "owner/name"]])
    assert flag(found.container("frontend"), "--served-model-name") == model["id"]
    assert [m["metadata"]["name"] for m in found.of("PersistentVolumeClaim")] == (
        ["rel-plait-models"] if claim == "rel-plait-models" else []
    )


def test_a_hubs_token_is_the_pulls_alone() -> None:
    found = render({"model": {"id": "o/n", "pull": {"tokenSecret": "hub"}}})
    for role in ROLES:
        spec = found.pod(role)["spec"]
        assert "hub-token" in yaml.safe_dump(spec["initContainers"])
        assert "hub-token" not in yaml.safe_dump(spec["containers"])


def test_clients_from_outside_reach_the_api_and_nothing_else() -> None:
    outside = {
        "ingress": {"enabled": True, "hosts": ["llm.example.com"], "className": "nginx"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gate"}]},
    }
    found = render(outside)
    (rule,) = found.get("Ingress", "")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/v1", "Prefix")
    assert path["backend"]["service"] == {"name": "rel-plait", "port": {"name": "http"}}
    (route,) = found.get("HTTPRoute", "")["spec"]["rules"]
    assert route["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert route["backendRefs"] == [{"name": "rel-plait", "port": 80}]
    assert route["timeouts"]["request"] == "0s"  # streams
