from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampler import LogprobRequest, SamplingState, draw_key, sample, score
from engine.types import SamplingParams
from kernels.sampling import exponentials as exponentials_of

CPU = torch.device("cpu")


def state(prompt=(), output=(), vocab=64, **params):
    params.setdefault("max_tokens", 10)
    return SamplingState.new(SamplingParams(**params), prompt, output, vocab, CPU)


def logits(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def exponentials(seed, position, vocab_size, device):
    return exponentials_of(draw_key(seed, position), vocab_size, device)


def draws(row, num, **params):
    """`num` tokens of one distribution, at successive positions of one seed."""
    states = [state(output=[0] * i, vocab=row.numel(), **params) for i in range(num)]
    return sample(row.expand(num, -1).clone(), states)


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_exponentials_are_positive_and_repeat(seed, position):
    values = exponentials(seed, position, 500, CPU)
    assert bool((values > 0).all())
    assert torch.equal(values, exponentials(seed, position, 500, CPU))


@pytest.mark.parametrize("over", ["tokens", "positions", "seeds"])
def test_exponentials_have_their_distribution_over_each_of_what_they_are_hashed_from(over):
    values = {
        "tokens": lambda: exponentials(3, 5, 20000, CPU),
        "positions": lambda: torch.stack([exponentials(3, i, 8, CPU)[7] for i in range(20000)]),
        "seeds": lambda: torch.stack([exponentials(i, 5, 8, CPU)[7] for i in range(20000)]),
    }[over]()
    counts = torch.histc(1 - torch.exp(-values), 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # 19 degrees of freedom, p = 0.001


def test_last_bits_of_the_logits_do_not_change_a_draw():
    """Flat over a large vocabulary, where adding probabilities up would amplify them."""
    row = logits(20000, seed=2, scale=0.5)
    noisy = row + 1e-5 * torch.randn(20000, generator=torch.Generator().manual_seed(1))
    # Two tokens are that near to each other in about one draw of 50,000.
    assert draws(row, 300, seed=8) == draws(noisy, 300, seed=8)


def test_greedy_takes_the_likeliest():
    rows = logits(5, 64)
    assert sample(rows, [state(temperature=0.0)] * 5) == rows.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-38, 1e-46, 5e-324])
def test_a_vanishing_temperature_is_greedy(temperature):
    rows = logits(5, 64)
    states = [state(temperature=temperature, seed=i) for i in range(5)]
    assert sample(rows, states) == rows.argmax(-1).tolist()


def test_frequencies_follow_the_softmax():
    row = logits(8, seed=3, scale=1.0)
    tokens = draws(row, 20000, temperature=1.7, seed=11)
    expected = torch.softmax(row / 1.7, -1) * 20000
    counts = torch.bincount(torch.tensor(tokens), minlength=8)
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3  # 7 degrees, p = 0.001


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 5, 64]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 0.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_only_what_the_filters_keep_is_drawn(seed, top_k, top_p, min_p, temperature):
    row = logits(64, seed=seed)
    probs = torch.softmax(row.double() / temperature, -1)
    order = probs.argsort(descending=True).tolist()
    kept = order[: top_k or 64]
    mass = sum(float(probs[t]) for t in kept)
    nucleus, total = [], 0.0
    for token in kept:
        if total >= top_p * mass - 1e-6 and nucleus:
            break
        nucleus.append(token)
        total += float(probs[token])
    allowed = {t for t in nucleus if float(probs[t]) >= min_p * float(probs[order[0]]) - 1e-9}
    tokens = draws(
        row, 300, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, seed=seed
    )
    assert set(tokens) <= allowed


def test_a_nucleus_wider_than_the_first_candidates_is_found():
    row = torch.zeros(5000)
    tokens = draws(row, 2000, top_p=0.9, seed=5)
    assert len(set(tokens)) > 1024


def test_a_row_does_not_depend_on_its_batch():
    rows = logits(6, 500, seed=9)
    states = [
        state(vocab=500, seed=i, temperature=0.5 * i, top_p=1 - 0.1 * i, top_k=50 * (i % 3))
        for i in range(6)
    ]
    together = sample(rows, states)
    assert together == [sample(rows[i : i + 1], [states[i]])[0] for i in range(6)]


def test_position_moves_the_draw_and_replay_repeats_it():
    row = logits(1, 500, scale=0.1)
    first = sample(row, [state(prompt=[1, 2], output=[3], vocab=500, seed=4)])
    replay = sample(row, [state(prompt=[1, 2], output=[3], vocab=500, seed=4)])
    later = draws(row[0], 20, seed=4)
    assert first == replay and len(set(later)) > 10


def test_bias_minimum_length_and_penalties():
    row = torch.zeros(1, 64)
    row[0, 7] = 1.0
    assert sample(row, [state(temperature=0.0, logit_bias={9: 5.0})]) == [9]
    assert sample(row, [state(temperature=0.0, logit_bias={7: -100.0, 3: 0.5})]) == [3]
    held = state(temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    assert sample(row, [held]) != [7]
    held.append(1)
    held.append(1)
    assert sample(row, [held]) == [7]
    row[0, 8] = 0.9
    assert sample(row, [state(temperature=0.0, output=[7], presence_penalty=0.2)]) == [8]
    assert sample(row, [state(temperature=0.0, prompt=[7], presence_penalty=0.2)]) == [7]
    assert sample(row, [state(temperature=0.0, output=[7, 8, 8], frequency_penalty=0.3)]) == [7]
    assert sample(row, [state(temperature=0.0, prompt=[7], repetition_penalty=2.0)]) == [8]


def test_a_stop_token_beyond_the_vocabulary_needs_no_holding_back():
    row = torch.zeros(1, 64)
    row[0, 7] = 1.0
    beyond = state(temperature=0.0, min_tokens=2, stop_token_ids=(64, 10**6))
    assert sample(row, [beyond]) == [7]
    both = state(temperature=0.0, min_tokens=2, stop_token_ids=(64, 7, 63))
    assert sample(row, [both]) == [0]


def test_penalty_counts_grow_with_the_output():
    row = torch.zeros(1, 64)
    row[0, 7], row[0, 8] = 1.0, 0.9
    one = state(temperature=0.0, frequency_penalty=0.2)
    tokens = []
    for _ in range(4):
        tokens += sample(row, [one])
        one.append(tokens[-1])
    assert tokens == [7, 8, 7, 8]


def test_scores_are_of_the_raw_distribution():
    rows = logits(3, 64)
    expected = torch.log_softmax(rows.double(), -1)
    scored = score(rows, [LogprobRequest(2, 5, 0), LogprobRequest(0, 6, 3)])
    assert [s.token_id for s in scored] == [5, 6]
    assert scored[0].logprob == pytest.approx(float(expected[2, 5]), abs=1e-5)
    assert scored[0].top == []
    top = expected[0].topk(3)
    assert [t for t, _ in scored[1].top] == top.indices.tolist()
    assert [v for _, v in scored[1].top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert math.isfinite(scored[1].logprob)
