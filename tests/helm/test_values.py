"""Values that are wrong are refused, by the schema or by a rule, with a message that helps."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from helm.schema import OF_THE_CHART, SCHEMA, definitions
from server.options.config import ServeConfig
from tests.helm.chart import render, template

GPU = {"accelerator": {"kind": "nvidia"}}
# Values, and what the message must say: where, and what would be accepted.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"foo": 1}, "additional properties 'foo' not allowed"),
    ({"frontend": {"replica": 2}}, "at '/frontend': additional properties 'replica' not allowed"),
    ({"frontend": {"replicas": 0}}, "at '/frontend/replicas': minimum: got 0, want 1"),
    ({"frontend": {"replicas": "two"}}, "at '/frontend/replicas': got string, want integer"),
    ({"prefill": {"groups": -1}}, "at '/prefill/groups': minimum: got -1, want 1"),
    ({"prefill": {"cpSize": 65}}, "at '/prefill/cpSize': maximum: got 65, want 64"),
    ({"prefill": {"cpSize": 1.5}}, "at '/prefill/cpSize': got number, want integer"),
    ({"prefill": {"sharedMemory": "8 GB"}}, "at '/prefill/sharedMemory': '8 GB' does not match"),
    ({"prefill": {"hosts": 2}}, "prefill.hosts 2: a prefill group runs on one host"),
    ({**GPU, "prefill": {"cpSize": 16}}, "prefill.cpSize 16: .* accelerator.perHost 8; expected 8"),
    ({"decode": {"cpSize": 2}}, "at '/decode': additional properties 'cpSize' not allowed"),
    ({"decode": {"startupSeconds": 1}}, "at '/decode/startupSeconds': minimum: got 1, want 30"),
    ({"decode": {"options": {"max_tokens": 1}}}, "properties 'max_tokens' not allowed"),
    (
        {"decode": {"options": {"max_running_requests": 0}}},
        "at '/decode/options/max_running_requests': minimum: got 0, want 1",
    ),
    (
        {"decode": {"options": {"cp_stream_block_tokens": 64}}},
        "at '/decode/options': additional properties 'cp_stream_block_tokens'",
    ),
    (
        {"prefill": {"options": {"hicache_ratio": 0}}},
        "at '/prefill/options/hicache_ratio': exclusiveMinimum: got 0, want 0",
    ),
    (
        {"prefill": {"options": {"hicache_write_policy": "later"}}},
        "hicache_write_policy': value must be one of 'write_through', 'write_through_selective'",
    ),
    ({"prefill": {"options": {"listen": "tcp://x:1"}}}, "additional properties 'listen'"),
    (
        {"frontend": {"options": {"router_policy": "random"}}},
        "router_policy': value must be one of 'prefix', 'least-loaded', 'round-robin'",
    ),
    (
        {"frontend": {"options": {"cors_allow_origins": "*"}}},
        "at '/frontend/options/cors_allow_origins': got string, want array",
    ),
    ({"options": {"log_level": "loud"}}, "at '/options/log_level': value must be one of 'debug'"),
    ({"options": {"otlp_endpoint": "host:4318"}}, "'host:4318' does not match pattern"),
    ({"options": {"page_size": 64}}, "at '/options': additional properties 'page_size'"),
    ({"accelerator": {"kind": "amd"}}, "at '/accelerator/kind': value must be one of 'none', 'nvi"),
    ({"accelerator": {"resource": "gpu"}}, "at '/accelerator/resource': 'gpu' does not match"),
    ({"image": {"digest": "abc"}}, "at '/image/digest': 'abc' does not match pattern"),
    ({"image": {"repository": "plait:cpu"}}, "at '/image/repository': 'plait:cpu' does not match"),
    ({"image": {"pullPolicy": "Sometimes"}}, "at '/image/pullPolicy': value must be one of"),
    ({"model": {"id": ""}}, "at '/model/id': '' does not match pattern"),
    ({"model": {"source": "s3"}}, "at '/model/source': value must be one of 'pull', 'claim'"),
    ({"model": {"source": "claim"}}, "model.claim.name is empty: .* PersistentVolumeClaim"),
    ({"model": {"pull": {"size": "big"}}}, "at '/model/pull/size': 'big' does not match"),
    ({"model": {"pull": {"accessModes": []}}}, "at '/model/pull/accessModes': minItems: got 0"),
    (
        {"discovery": "consul"},
        "at '/discovery': value must be one of 'kubernetes', 'dns', 'static'",
    ),
    (
        {"discovery": "static", "decode": {"autoscaling": {"kind": "keda"}}},
        "discovery static: front ends would not learn of workers",
    ),
    ({"transfer": {"protocol": "nvlink"}}, "at '/transfer/protocol': value must be one of 'tcp'"),
    ({"transfer": {"protocol": "rdma"}}, "transfer.rdmaResource is empty: .* such as rdma/hca"),
    ({"transfer": {"minPort": 80}}, "at '/transfer/minPort': minimum: got 80, want 1,024"),
    ({"transfer": {"minPort": 18000}}, "transfer.minPort 18000: is above transfer.maxPort 17000"),
    ({"transfer": {"minPort": 6900}}, "maxPort 17000: 7000 is among them, where workers listen"),
    (
        {"transfer": {"minPort": 20000, "maxPort": 20002}, "prefill": {"cpSize": 2}},
        "each rank of a pod takes two ports; expected 4 ports or more",
    ),
    (
        {"prefill": {"options": {"enable_nsa_prefill_cp_shared_kv": True}}},
        "one rank has nobody to share with; expected prefill.cpSize 2 or more",
    ),
    (
        {"decode": {"options": {"hicache_ratio": 3}}},
        "decode.options.hicache_ratio: means nothing without decode.options.enable_hierarchical",
    ),
    ({"prefill": {"options": {"hicache_storage_backend": "x"}}}, "'hicache_storage_backend' not"),
    (
        {"decode": {"options": {"mem_fraction_static": 1}}},
        "at '/decode/options/mem_fraction_static': exclusiveMaximum: got 1, want 1",
    ),
    (
        {"frontend": {"podLabels": {"app.kubernetes.io/component": "decode"}}},
        "frontend.podLabels: app.kubernetes.io/component is what the chart finds its pods by",
    ),
    ({"fullnameOverride": "a.b"}, "its services would be called a.b, .* a letter first"),
    ({"fullnameOverride": "1a"}, "its services would be called 1a, .* a letter first"),
    ({"drain": {"timeoutSeconds": -5}}, "at '/drain/timeoutSeconds': minimum: got -5, want 0"),
    (
        {"frontend": {"autoscaling": {"kind": "hpa", "minReplicas": 9}}},
        "frontend.autoscaling.minReplicas 9: is above maxReplicas 6",
    ),
    ({"frontend": {"autoscaling": {"kind": "vpa"}}}, "kind': value must be one of 'none', 'hpa'"),
    (
        {"frontend": {"env": [{"name": "PLAIT_MAX_N", "value": "4"}]}},
        "frontend.env: PLAIT_MAX_N: .* expected max_n among frontend.options, if `plait frontend"
        " --help` has --max-n and",
    ),
    (
        {"decode": {"env": [{"name": "PLAIT_HOME", "value": "/models"}]}},
        "decode.env: PLAIT_HOME is no option: the chart itself .* models by model.source",
    ),
    (
        {"decode": {"env": [{"name": "PLAIT_CONFIG", "value": "/etc/plait.yaml"}]}},
        "decode.env: PLAIT_CONFIG is no option: .* options by name among decode.options",
    ),
    ({"frontend": {"env": [{"name": "1X"}]}}, "at '/frontend/env/0/name': '1X' does not match"),
    ({"frontend": {"resources": {"limit": {}}}}, "additional properties 'limit' not allowed"),
    (
        {"frontend": {"resources": {"limits": {"memory": "4 Gi"}}}},
        "at '/frontend/resources/limits/memory': '4 Gi' does not match",
    ),
    ({"frontend": {"nodeSelector": {"a": True}}}, "at '/frontend/nodeSelector/a': got boolean"),
    ({"service": {"type": "Cluster"}}, "at '/service/type': value must be one of 'ClusterIP'"),
    ({"service": {"port": 70000}}, "at '/service/port': maximum: got 70,000, want 65,535"),
    ({"ingress": {"enabled": True}}, "at '/ingress/hosts': minItems: got 0, want 1"),
    (
        {"ingress": {"enabled": True, "hosts": ["https://x.org"]}},
        "at '/ingress/hosts/0': 'https://x.org' does not match",
    ),
    ({"httpRoute": {"enabled": True}}, "at '/httpRoute/parentRefs': minItems: got 0, want 1"),
    ({"networkPolicy": {"clients": [{}]}}, "at '/networkPolicy/clients/0': minProperties"),
    ({"networkPolicy": {"clients": [{"ip": "::/0"}]}}, "additional properties 'ip' not allowed"),
    ({"apiKeys": {"keys": ["secret"]}}, "at '/apiKeys': additional properties 'keys' not allowed"),
    ({"monitoring": {"podMonitors": True}}, "at '/monitoring/podMonitors': value must be one of"),
    ({"monitoring": {"interval": "often"}}, "at '/monitoring/interval': 'often' does not match"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=lambda part: json.dumps(part)[:60])
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    done = template(values)
    assert done.returncode != 0
    assert re.search(message, done.stderr), done.stderr


def test_option_tables_are_the_products() -> None:
    """`python -m helm.schema` writes them."""
    committed = json.loads(SCHEMA.read_text(encoding="utf-8"))["definitions"]
    for name, table in definitions().items():
        assert committed[name] == table, "plait's options changed: run `python -m helm.schema`"


def test_what_is_left_out_of_the_tables_is_there() -> None:
    assert set(ServeConfig.model_fields) >= OF_THE_CHART


def test_every_object_of_the_schema_is_closed() -> None:
    """Those without properties are maps, or Kubernetes' own, which the API checks."""

    def walk(part: Any, path: str) -> None:
        if isinstance(part, dict):
            if part.get("type") == "object" and "properties" in part:
                assert part["additionalProperties"] is False, path
            for key, value in part.items():
                walk(value, f"{path}/{key}")
        elif isinstance(part, list):
            for item in part:
                walk(item, path)

    walk(json.loads(SCHEMA.read_text(encoding="utf-8")), "")


def test_options_arrive_as_they_were_written() -> None:
    """Large whole numbers included, which YAML in Go takes for floating-point."""
    rendered = render(
        {
            "options": {"log_level": "debug"},
            "frontend": {
                "options": {
                    "max_queued_tokens": 16_777_216,
                    "metrics_need_key": True,
                    "cors_allow_origins": ["https://a.org", "https://b.org"],
                }
            },
            "prefill": {"options": {"dtype": "float32", "log_level": "error"}},
            "decode": {"options": {"mem_fraction_static": 0.75}},
        }
    )
    env = {v["name"]: v.get("value") for v in rendered.container("frontend")["env"]}
    assert env["PLAIT_MAX_QUEUED_TOKENS"] == "16777216"
    assert env["PLAIT_METRICS_NEED_KEY"] == "true"
    assert env["PLAIT_CORS_ALLOW_ORIGINS"] == "https://a.org,https://b.org"
    assert env["PLAIT_LOG_LEVEL"] == "debug"
    env = {v["name"]: v.get("value") for v in rendered.container("prefill")["env"]}
    assert env["PLAIT_LOG_LEVEL"] == "error"  # the role's own wins
    env = {v["name"]: v.get("value") for v in rendered.container("decode")["env"]}
    assert env["PLAIT_MEM_FRACTION_STATIC"] == "0.75"
