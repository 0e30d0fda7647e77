"""What one engine chose, recorded, and taken over by another: the GPU's way to read its KV, in the
torch forms of its kernels, beside the CPU's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import engine.loading
from benchmarks.gpu_choices import (
    MOST_SHORTFALL,
    Choices,
    Verdict,
    _route_shortfall,
    recording,
    shortfall,
    taking_over,
)
from engine.attention.tables import TableAttention
from kernels import index_topk
from tests.engine.client import Client
from tests.tiny import save_dsa

TOPK, EXPERTS = 16, 2  # of save_dsa
OPTIONS = {"max_total_tokens": 64 * 12, "chunked_prefill_size": 37, "max_running_requests": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dsa(tmp_path_factory.mktemp("model"), head_scale=20.0)


def answers(folder: Path) -> list[list[int]]:
    client = Client(folder, **OPTIONS)
    generator = torch.Generator().manual_seed(3)
    for i, length in enumerate((3, 90, 14, 40, 1, 70)):
        prompt = torch.randint(3, 199, (length,), generator=generator).tolist()
        client.submit(f"r{i}", prompt, max_tokens=8, temperature=0.0)
    client.run()
    return [client.tokens[f"r{i}"] for i in range(6)]


def record(folder: Path) -> tuple[Choices, list[list[int]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.loading, "local_attention", TableAttention)
        cpu = torch.device("cpu")
        with recording(cpu, TOPK, EXPERTS, num_layers=3, most_tokens=64) as choices:
            tokens = answers(folder)
    return choices, tokens


@pytest.fixture(scope="module")
def recorded(folder: Path) -> tuple[Choices, list[list[int]]]:
    return record(folder)


def copied(choices: Choices) -> Choices:
    return Choices(
        {place: chosen.clone() for place, chosen in choices.selected.items()},
        {place: ids.clone() for place, ids in choices.experts.items()},
    )


def take_over(folder: Path, choices: Choices) -> tuple[Verdict, list[list[int]]]:
    with taking_over(choices) as verdict:
        tokens = answers(folder)
    return verdict, tokens


def test_right_choices_are_found_right_and_lead_to_the_same_tokens(folder, recorded):
    choices, expected = recorded
    verdict, tokens = take_over(folder, choices)
    assert tokens == expected
    assert verdict.is_right
    # 8 tokens of which the last is not computed; three layers select, two route.
    computed = [length + 7 for length in (3, 90, 14, 40, 1, 70)]
    selecting = sum(max(0, length - TOPK) for length in computed)
    assert verdict.num_choices == 3 * selecting + 2 * sum(computed)


def test_wrong_selections_are_found_and_lead_elsewhere(folder, recorded):
    choices, expected = recorded
    wrong = copied(choices)
    for chosen in wrong.selected.values():
        chosen[:] = torch.arange(TOPK)
    verdict, tokens = take_over(folder, wrong)
    assert not verdict.is_right
    assert tokens != expected


def test_choices_by_scores_that_are_less_exact_are_found(folder, monkeypatch):
    causal = index_topk.causal
    monkeypatch.setattr(
        index_topk, "causal", lambda q, *args: causal(q.bfloat16().to(q.dtype), *args)
    )
    verdict, _ = take_over(folder, record(folder)[0])
    assert verdict.num_ties > 0
    assert not verdict.is_right


@pytest.mark.parametrize("kind", ["selected", "experts"])
def test_a_single_wrong_choice_is_found(folder, recorded, kind):
    wrong = copied(recorded[0])
    place, chosen = next((p, c) for p, c in getattr(wrong, kind).items() if p[1] == 60)
    others = range(61) if kind == "selected" else range(4)
    free = [i for i in others if i not in chosen[1].tolist()]
    chosen[1, 0] = free[len(free) // 2]
    if kind == "selected":
        chosen[1] = chosen[1].sort().values
    verdict, _ = take_over(folder, wrong)
    assert not verdict.is_right, place


def test_a_choice_falls_short_by_what_it_lacks():
    scores = torch.tensor([4.0, 1.0, 2.0, -8.0, 1.5]).double()
    assert shortfall(scores, torch.tensor([0, 2])) == 0
    assert shortfall(scores, torch.tensor([0, 4])) == 0.5 / 8
    assert shortfall(scores, torch.tensor([0, 1, 2, 3, 4])) == 0
    assert shortfall(torch.zeros(3), torch.tensor([2])) == 0  # a tie
    for no_choice in ([0, 0], [0, -1], [0, 5]):
        assert shortfall(scores, torch.tensor(no_choice)) == torch.inf
    assert shortfall(scores * torch.nan, torch.tensor([0, 2])) == torch.inf


def test_near_ties_pass_and_are_counted_wider_ones_do_not():
    verdict = Verdict()
    for lacks in (0.0, MOST_SHORTFALL / 2):
        verdict.add(lacks)
    assert verdict.is_right
    assert (verdict.num_choices, verdict.num_ties) == (2, 1)
    verdict.add(MOST_SHORTFALL * 2)
    assert not verdict.is_right


def test_experts_of_the_best_groups():
    """Groups of two: sums 1.1, 0.9, 1.0; two of them compete."""
    gate = SimpleNamespace(n_group=3, topk_group=2, bias=torch.zeros(6))
    scores = torch.tensor([0.8, 0.3, 0.5, 0.4, 0.9, 0.1]).double()
    assert _route_shortfall(scores, torch.tensor([4, 0]), gate) == 0
    assert _route_shortfall(scores, torch.tensor([4]), gate) == 0
    # Expert 2 is of the third best group, which lacks 0.1 of 1.1.
    assert _route_shortfall(scores, torch.tensor([0, 2]), gate) == pytest.approx(0.1 / 1.1)
    assert _route_shortfall(scores, torch.tensor([0, 1]), gate) == pytest.approx(0.6 / 0.9)
    assert _route_shortfall(scores, torch.tensor([0, 2, 4]), gate) == torch.inf
