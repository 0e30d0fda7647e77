"""On a CUDA device: what the CPU answers in float32, the GPU answers, whatever is batched, chunked,
cached or retracted; and each kernel's torch form gives the same there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.capacity import CapacityError
from kernels.attention import attend, merge
from kernels.index_logits import index_logits
from kernels.topk import exact_topk
from tests.engine.client import Client
from tests.gpu.waits import never_waits
from tests.tiny import save_dsa, save_llama, save_mla

OPTIONS = {"max_total_tokens": 64 * 8, "chunked_prefill_size": 37, "max_running_requests": 16}


@pytest.fixture(scope="module", params=[save_dsa, save_mla, save_llama], ids=["dsa", "mla", "gqa"])
def folder(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


def answers(client: Client) -> dict[str, list[int]]:
    rng = random.Random(5)
    prefixes = [[rng.randrange(3, 199) for _ in range(n)] for n in (0, 64, 130)]
    for i in range(30):
        own = [rng.randrange(3, 199) for _ in range(rng.choice([1, 3, 30, 63, 65, 100]))]
        client.submit(
            f"r{i}",
            rng.choice(prefixes) + own,
            max_tokens=rng.choice([1, 7, 20, 150]),
            seed=i,
            temperature=rng.choice([0.0, 0.7]),
        )
    client.run()
    assert client.engine.scheduler.counts["retracted"] > 0
    return client.tokens


@pytest.fixture(scope="module")
def cpu_answers(folder) -> dict[str, list[int]]:
    return answers(Client(folder, device="cpu", **OPTIONS))


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_float32_answers_equal_those_of_the_cpu(folder, cpu_answers, cuda_graphs):
    gpu = answers(Client(folder, device="cuda", cuda_graphs=cuda_graphs, **OPTIONS))
    different = [rid for rid in cpu_answers if cpu_answers[rid] != gpu[rid]]
    assert not different


@pytest.mark.parametrize("step", ["_forward_all", "_decode"])
def test_no_forward_waits_for_the_device(folder, monkeypatch, step):
    """`_decode` draws the tokens, too."""
    client = Client(folder, device="cuda", dtype="bfloat16", cuda_graphs=False, **OPTIONS)
    never_waits(monkeypatch, step)
    answers(client)
    assert client.engine.leader.runner.ahead_counts["taken"] > 0


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_index_keys_in_fp8_serve_and_nothing_waits(tmp_path, monkeypatch, cuda_graphs):
    client = Client(
        save_dsa(tmp_path),
        device="cuda",
        dtype="bfloat16",
        index_cache_dtype="fp8_e4m3",
        cuda_graphs=cuda_graphs,
        **OPTIONS,
    )
    assert client.engine.bytes_per_token == 3 * (2 * 48 + 32 + 4)
    never_waits(monkeypatch, "_forward_all")
    answers(client)
    assert all(end.finish_reason == "length" for end in client.ends.values())


def test_a_pool_beyond_the_device_is_refused(folder):
    with pytest.raises(CapacityError, match=r"--max-total-tokens 100000000000: .* accepted are up"):
        Client(folder, device="cuda", max_total_tokens=10**11)


def test_bfloat16_serves(folder):
    client = Client(folder, device="cuda", dtype="bfloat16", **OPTIONS)
    answers(client)
    assert all(end.finish_reason == "length" for end in client.ends.values())


@pytest.mark.parametrize("seed", range(3))
def test_attention_and_topk_against_float64(seed):
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k, v = draw(2, 35, 24), draw(2, 301, 24), draw(2, 301, 16)
    allowed = torch.rand(35, 301, generator=generator, device="cuda") < 0.5
    allowed[:, 0] = True
    parts = None
    for a, b in ((0, 100), (100, 299), (299, 301)):
        parts = merge(parts, attend(q, k[:, a:b], v[:, a:b], allowed[:, a:b], 0.3))
    scores = (q.double() @ k.double().transpose(1, 2) * 0.3).masked_fill(~allowed, -torch.inf)
    assert (parts.out - scores.softmax(-1) @ v.double()).abs().max() < 1e-5

    qi, w, ki = draw(9, 8, 32), draw(9, 8), draw(500, 32)
    got = index_logits(qi, w, ki)
    want = (qi.double() @ ki.double().t()).relu() * w.double().unsqueeze(-1)
    assert (got - want.sum(1)).abs().max() < 1e-4

    tied = torch.randint(0, 6, (7, 400), generator=generator, device="cuda").float()
    order = torch.sort(tied.cpu(), dim=-1, descending=True, stable=True).indices[:, :50]
    assert torch.equal(exact_topk(tied, 50).cpu(), order.sort(-1).values)
