"""What workers EndpointSlices name: conditions, families, ports, slices that overlap."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.discovery.endpoint_slices import EndpointSlice, addresses_of


def part(*endpoints: dict[str, Any], family: str = "IPv4", ports: object = None) -> EndpointSlice:
    value = {
        "metadata": {"name": "x", "uid": "7"},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": ports or [{"name": "control", "port": 7000, "protocol": "TCP"}],
    }
    return msgspec.json.decode(msgspec.json.encode(value), type=EndpointSlice)


def at(host: str, conditions: object = None) -> dict[str, Any]:
    return {"addresses": [host, "10.9.9.9"], "conditions": conditions, "zone": "a"}


@pytest.mark.parametrize(
    ("conditions", "takes_work"),
    [
        (None, True),
        ({}, True),
        ({"ready": None}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        # A service that publishes addresses that are not ready.
        ({"ready": True, "serving": True, "terminating": True}, False),
    ],
)
def test_only_what_is_ready_and_not_ending_takes_work(conditions: object, takes_work: bool) -> None:
    assert addresses_of([part(at("10.0.0.1", conditions))], "control") == {
        "tcp://10.0.0.1:7000": takes_work
    }


def test_an_endpoint_in_two_slices_is_ready_where_one_says_so() -> None:
    slices = [part(at("10.0.0.1", {"ready": False})), part(at("10.0.0.1"), at("10.0.0.2"))]
    for order in (slices, slices[::-1]):
        assert addresses_of(order, "control") == {
            "tcp://10.0.0.1:7000": True,
            "tcp://10.0.0.2:7000": True,
        }


def test_a_worker_of_both_families_counts_once() -> None:
    v6 = part(at("fd00::7"), family="IPv6")
    assert addresses_of([v6, part(at("10.0.0.1"))], "control") == {"tcp://10.0.0.1:7000": True}
    assert addresses_of([v6, part()], "control") == {"tcp://[fd00::7]:7000": True}
    assert addresses_of([part(at("a.example"), family="FQDN")], "control") == {}


def test_each_slice_has_its_own_number_for_a_port() -> None:
    ports = [
        {"name": "control", "port": 9, "protocol": "UDP"},
        {"name": "control", "port": 7001, "protocol": "TCP"},
    ]
    slices = [part(at("10.0.0.1")), part(at("10.0.0.2"), ports=ports)]
    assert set(addresses_of(slices, "control")) == {"tcp://10.0.0.1:7000", "tcp://10.0.0.2:7001"}
    assert set(addresses_of(slices, "7005")) == {"tcp://10.0.0.1:7005", "tcp://10.0.0.2:7005"}
    assert addresses_of(slices, "http") == {}
