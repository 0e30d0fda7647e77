"""docs/observe.md names every metric there is, with its type and labels, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from engine.messages import Hello
from engine.metrics.worker import WorkerMetrics, _from_channel
from engine.types import MetricFamily, Role
from kvcache.transfer.loopback import LoopbackNetwork
from server.dispatch.fleet import Fleet
from server.metrics import Metrics
from tests.documented import DOCS, documented
from tests.engine.handoff.pair import Pair
from tests.identity import MODEL_ID
from tests.tiny import save_dsa


def of_workers(families: Iterable[MetricFamily]) -> dict[str, tuple[str, frozenset[str]]]:
    return {
        family.name: (
            family.kind,
            frozenset(label for s in family.samples for label in s.labels) - {"le"},
        )
        for family in families
    }


def test_the_docs_name_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    fleet = Fleet()
    fleet.join(
        "tcp://w",
        Hello(
            instance_id="w",
            role="decode",
            pid=1,
            host="here",
            model="tiny",
            vocab_size=100,
            context_length=1024,
            page_size=64,
            total_pages=16,
            model_id=MODEL_ID,
            cp_size=1,
        ),
    )
    metrics.watch(fleet)
    metrics.requests.labels("/v1", "stop")
    metrics.errors.labels("overloaded", "503")
    expected = {
        family.name: (
            family.type,
            frozenset(label for s in family.samples for label in s.labels) - {"le"},
        )
        for family in metrics.registry.collect()
    }
    network = LoopbackNetwork()
    monkeypatch.setattr("engine.loading.MooncakeEngine", lambda host, protocol: network.engine())
    pool = {"max_total_tokens": 1024, "hicache": True}
    pair = Pair(save_dsa(tmp_path), prefill=pool, decode=pool)
    pair.submit("r", list(range(3, 30)), max_tokens=2)
    pair.run()
    for node in (pair.prefill, pair.decode):
        for phase in ("prepare", "forward", "sample"):
            node.metrics._step_seconds.labels(phase)
        expected |= of_workers(node.metrics.families(node.engine, num_malformed=0, refused={}))
    pair.close()
    assert documented() == expected


@pytest.mark.parametrize("role", ["colocated", "prefill", "decode"])
def test_a_role_has_the_stages_that_the_docs_give_it(role: Role) -> None:
    rows = re.findall(
        r"^\| `(plait_\w+_seconds)` \| histogram \| ([\w, ]+) \| [^|]+ \|$",
        DOCS.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    of_role = {name for name, roles in rows if role in roles.split(", ")}
    assert len(rows) == 6
    assert set(WorkerMetrics(role)._stages) == of_role


def test_the_docs_name_every_reason_to_refuse_a_message() -> None:
    row = next(
        line
        for line in DOCS.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `plait_refused_messages_total{")
    )
    reasons = {
        sample.labels["reason"]
        for family in _from_channel(num_malformed=0, refused={})
        if family.name == "plait_refused_messages"
        for sample in family.samples
    }
    assert reasons
    assert not [reason for reason in reasons if f"`{reason}`" not in row]
