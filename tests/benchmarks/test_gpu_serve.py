"""How answers are compared, what is nearly a tie, and what an idle fleet may not have."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.gpu_serve import (
    NEAR_TIE,
    PROMPTS,
    Answer,
    Token,
    busy,
    commands,
    compare,
    parting,
    unlike,
)
from tests.served import Metrics

WIDE, NARROW = 1.0, NEAR_TIE / 2  # margins


def tokens(texts: str, margin: float = WIDE) -> list[Token]:
    return [Token(text, [-0.5, -0.5 - margin]) for text in texts]


def answers(first: list[Token]) -> list[Answer]:
    """To all prompts; the first one's tokens are told."""
    return [Answer("", "stop", (9, 3), tokens=first if i == 0 else []) for i in range(len(PROMPTS))]


def test_answers_are_alike_in_what_a_client_relies_on() -> None:
    answer = Answer("Paris.", "stop", (37, 8))
    assert unlike(answer, dataclasses.replace(answer, seconds=3.0, num_cached=64)) == ""
    for change in ({"text": "Paris"}, {"finish_reason": "length"}, {"usage": (37, 9)}):
        assert str(next(iter(change.values()))) in unlike(
            answer, dataclasses.replace(answer, **change)
        )


def test_tokens_part_at_the_first_difference() -> None:
    assert parting(tokens("abc"), tokens("abc", NARROW)) == ("", False)
    text, is_near_tie = parting(tokens("abcd"), tokens("abxy"))
    assert text.startswith("token 2 of 4 and 4: 'c' by 1 nats and 'x' by 1 nats")
    assert not is_near_tie


def test_a_near_tie_is_one_to_both() -> None:
    assert parting(tokens("a", NARROW), tokens("b", NARROW))[1]
    assert not parting(tokens("a", NARROW), tokens("b", WIDE))[1]


@pytest.mark.parametrize(("margin", "is_near_tie"), [(NARROW, True), (WIDE, False)])
def test_where_one_ends_the_other_decides(margin: float, is_near_tie: bool) -> None:
    longer = [*tokens("ab"), *tokens("c", margin)]
    for text, found in (parting(tokens("ab"), longer), parting(longer, tokens("ab"))):
        assert text.startswith("token 2 of ") and "'c'" in text
        assert found == is_near_tie


def test_fleets_with_equal_tokens_tell_how_far_log_probabilities_are_apart() -> None:
    other = [Token("a", [-0.5, -2.0]), Token("b", [-0.75, -2.0])]
    wrong: list[str] = []
    found = compare(answers(tokens("ab")), answers(other), "float32", wrong)
    assert found == {"equal_prompts": len(PROMPTS), "near_ties": [], "logprobs_within": 0.25}
    assert not wrong


@pytest.mark.parametrize(
    ("dtype", "margin", "is_wrong"),
    [("float32", NARROW, True), ("auto", NARROW, False), ("auto", WIDE, True)],
)
def test_near_ties_are_told_and_pass_but_not_in_float32(
    dtype: str, margin: float, is_wrong: bool
) -> None:
    wrong: list[str] = []
    parted = answers(tokens("a", margin)), answers(tokens("b", margin))
    found = compare(*parted, dtype, wrong)
    assert found["equal_prompts"] == len(PROMPTS) - 1
    assert (len(wrong), len(found["near_ties"])) == ((1, 0) if is_wrong else (0, 1))
    assert PROMPTS[0] in (wrong or found["near_ties"])[0]


def page(**values: float) -> Metrics:
    states = {state: values.get(state, 0) for state in ("held", "locked", "fenced")}
    lines = [
        f'plait_pool_pages{{role="{role}",state="{state}"}} {value}'
        for role in ("prefill", "decode")
        for state, value in {"free": 5.0, "evictable": 3.0, **states}.items()
    ]
    names = ["requests_running", "requests_waiting", "handoff_rooms"]
    for name in [*names, "worker_running_requests", "worker_waiting_requests"]:
        lines.append(f"plait_{name} {values.get(name, 0.0)}")
    return Metrics("\n".join(lines))


def test_cached_pages_are_no_work() -> None:
    assert busy(page()) == {}


@pytest.mark.parametrize("name", ["requests_running", "worker_waiting_requests", "handoff_rooms"])
def test_requests_and_rooms_are_work(name: str) -> None:
    assert busy(page(**{name: 2.0})) == {name: 2.0}


def test_pages_in_use_are_summed_over_the_workers() -> None:
    assert busy(page(fenced=2.0)) == {"fenced pages": 4.0}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_workers_that_share_a_card_start_before_the_front_end(device: str) -> None:
    told = commands(True, device, "auto", "/folder")
    assert list(told) == ["prefill", "decode", "frontend"]
    of = {role: told[role][told[role].index("--listen") + 1] for role in ("prefill", "decode")}
    assert ",".join(of.values()) in told["frontend"]
    shares = [float(told[role][told[role].index("--mem-fraction-static") + 1]) for role in of]
    assert sum(shares) < 1
    assert list(commands(False, device, "auto", "/folder")) == ["serve"]
