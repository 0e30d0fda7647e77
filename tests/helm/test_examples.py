"""Every example renders to what Kubernetes and plait take."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from scripts.run_chart.containers import in_bytes
from server.options.arguments import options_of
from server.options.loading import load
from server.options.option import ENV_PREFIX
from server.verbs import _parser
from tests.helm.chart import CHART, EXAMPLES, Manifest, Rendered, render, render_example, run

# Kinds of other projects: their schemas are theirs.
FOREIGN = {"HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject"}
ROLES = ("frontend", "prefill", "decode")


@pytest.fixture(scope="module", params=["defaults", *EXAMPLES])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render() if request.param == "defaults" else render_example(request.param)


def test_there_are_the_examples_that_the_docs_name() -> None:
    assert set(EXAMPLES) == {"cpu-demo", "h200-2", "v32-8xh200", "multi-host"}


@pytest.mark.parametrize("name", [None, *EXAMPLES])
def test_helm_finds_nothing_to_complain_of(name: str | None) -> None:
    values = ["--values", str(EXAMPLES[name])] if name else []
    done = run("lint", "--strict", str(CHART), *values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.27", "1.37"])  # Chart.yaml's least, and the latest
def test_manifests_are_what_kubernetes_takes(version: str) -> None:
    """Once each: examples differ in little."""
    seen: list[Manifest] = []
    for name in EXAMPLES:
        for manifest in render_example(name).manifests:
            if manifest["kind"] not in FOREIGN and manifest not in seen:
                kubernetes_validate.validate(manifest, version, strict=True)
                seen.append(manifest)
    assert {m["kind"] for m in seen} >= {
        "Deployment",
        "StatefulSet",
        "NetworkPolicy",
        "Role",
        "Pod",
    }


def test_strict_validation_finds_a_wrong_key() -> None:
    manifest = copy.deepcopy(render().container("decode"))
    manifest = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [manifest]}}
    kubernetes_validate.validate(manifest, "1.37", strict=True)
    manifest["spec"]["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="comand"):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_full_pools_fit_the_memory_of_the_cpu_demo(default_model: Path) -> None:
    """A pool takes its memory as it fills: one that is too large would be killed, much later."""
    config = json.loads((default_model / "config.json").read_text())
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"] + config["index_head_dim"]
    token_bytes = 4 * row * config["num_hidden_layers"]  # KV is float32 on a CPU
    weights = sum(file.stat().st_size for file in default_model.glob("*.safetensors"))
    libraries = 250 * 2**20
    for role in ("prefill", "decode"):
        container = render_example("cpu-demo").container(role)
        flags = {flag: value for flag, _, value in (a.partition("=") for a in container["args"])}
        variables = {entry["name"]: entry.get("value") for entry in container["env"]}
        num_tokens = int(variables[f"{ENV_PREFIX}MAX_TOTAL_TOKENS"])
        num_ranks = int(flags.get("--prefill-cp-size", 1))
        needed = num_ranks * (num_tokens * token_bytes + weights + libraries)
        assert needed < in_bytes(container["resources"]["limits"]["memory"])


def test_names_are_there_once(rendered: Rendered) -> None:
    names = [(m["kind"], m["metadata"]["name"]) for m in rendered.manifests]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)


@pytest.mark.parametrize("role", ROLES)
def test_commands_are_plaits_and_so_are_their_values(
    rendered: Rendered, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = rendered.container(role)
    argv = [arg.replace("$(POD_IP)", "10.1.2.3") for arg in container["args"]]
    flags = vars(_parser().parse_args(argv))
    assert flags.pop("verb") == role
    for variable in container["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    options = load(flags, flags.pop("config", None))
    assert options.cluster_key_file is not None
    if role == "frontend":
        assert options.workers
    else:
        assert options.listen == "tcp://10.1.2.3:7000"
        assert options.transfer_host == "10.1.2.3"


@pytest.mark.parametrize("role", ROLES)
def test_variables_are_options_of_the_command(rendered: Rendered, role: str) -> None:
    """PLAIT_HOME is where models lie, no option."""
    names = {v["name"] for v in rendered.container(role)["env"]} - {"PLAIT_HOME"}
    options = {option.variable for option in options_of(role)}
    assert {name for name in names if name.startswith(ENV_PREFIX)} <= options


def test_init_containers_and_tests_are_plaits_commands(rendered: Rendered) -> None:
    for pod in rendered.pods():
        for container in pod["spec"].get("initContainers", []):
            _parser().parse_args(container["args"])
    (test,) = rendered.of("Pod")
    (line,) = re.findall(r"exec plait (.*)", test["spec"]["containers"][0]["command"][-1])
    args = _parser().parse_args(line.split())
    assert args.base_url == "http://rel-plait:80"


def selected(selector: Manifest, pods: list[Manifest]) -> list[Manifest]:
    wanted = selector.items()
    return [pod for pod in pods if wanted <= pod["metadata"]["labels"].items()]


def test_selectors_match_the_pods_they_mean(rendered: Rendered) -> None:
    pods = rendered.pods()
    by_role = {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in pods}
    assert set(by_role) == {*ROLES, "test"}
    for role in ROLES:
        labels = rendered.workload(role)["spec"]["selector"]["matchLabels"]
        assert selected(labels, pods) == [by_role[role]]
        budget = rendered.get("PodDisruptionBudget", role)
        assert selected(budget["spec"]["selector"]["matchLabels"], pods) == [by_role[role]]
        service = rendered.get("Service", "" if role == "frontend" else role)
        assert selected(service["spec"]["selector"], pods) == [by_role[role]]
        for spread in by_role[role]["spec"]["topologySpreadConstraints"]:
            assert selected(spread["labelSelector"]["matchLabels"], pods) == [by_role[role]]


def test_services_lead_to_ports_that_are_there(rendered: Rendered) -> None:
    for role in ROLES:
        ports = {p["name"]: p["containerPort"] for p in rendered.container(role)["ports"]}
        service = rendered.get("Service", "" if role == "frontend" else role)["spec"]
        for port in service["ports"]:
            if port["name"] != "transfer":
                assert port["targetPort"] in ports
        if role == "frontend":
            assert ports == {"http": 8000}
        else:
            assert ports == {"control": 7000, "health": 7001}
            assert service["clusterIP"] == "None"
            assert rendered.workload(role)["spec"]["serviceName"].endswith(f"-{role}")
    transfer = rendered.get("Service", "decode")["spec"]["ports"][-1]
    assert transfer["name"] == "transfer"


def test_the_curl_line_of_the_notes_names_the_model(rendered: Rendered) -> None:
    del rendered
    done = run("install", "rel", str(CHART), "--dry-run=client", "--namespace", "space")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("NOTES:")[1]
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in notes
    assert '"model": "smollm2-135m-dsv32"' in notes
    assert "service/rel-plait 8000:80" in notes


def test_values_yaml_and_its_schema_know_the_same_keys() -> None:
    def keys(values: Any, path: str = "") -> set[str]:
        if not isinstance(values, dict) or not values:
            return {path}
        return {key for name, value in values.items() for key in keys(value, f"{path}.{name}")}

    def known(schema: Any, path: str = "") -> set[str]:
        properties = schema.get("properties")
        if not properties:
            return {path}
        return {key for name, part in properties.items() for key in known(part, f"{path}.{name}")}

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    free = (".affinity", ".resources", ".dashboardLabels")
    wanted = {key for key in keys(values) if not any(part in key for part in free)}
    found = {key for key in known(schema) if not any(part in key for part in free)}
    assert wanted == found - {".global"}
