"""On CUDA devices: a prefill worker hands over to a decode worker, by the real transfer engine, and
the answers are those of one worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.client import Client
from tests.engine.handoff.pair import Pair
from tests.engine.handoff.test_handoff import requests
from tests.tiny import save_dsa, save_llama, save_mla

TOKENS = 2048


@pytest.fixture(scope="module", params=[save_dsa, save_mla, save_llama], ids=["dsa", "mla", "gqa"])
def folder(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


def test_handed_over_equals_colocated(folder: Path) -> None:
    asked = requests()
    alone = Client(folder, device="cuda", max_total_tokens=TOKENS)
    for rid, (token_ids, sampling) in asked.items():
        alone.submit(rid, token_ids, **sampling)
        alone.run()
    last = f"cuda:{torch.cuda.device_count() - 1}"
    pair = Pair(
        folder,
        prefill={
            "device": "cuda:0",
            "max_total_tokens": TOKENS,
            "chunked_prefill_size": 100,
        },
        decode={"device": last, "max_total_tokens": TOKENS},
    )
    try:
        for rid, (token_ids, sampling) in asked.items():
            pair.submit(rid, token_ids, **sampling)
        pair.run()
        assert pair.from_decode == set(asked) and not pair.hand_backs
        for rid in asked:
            assert pair.tokens(rid) == alone.tokens[rid], rid
        assert all(pair.prefill.scheduler.prefill_side.pages_sent)
        pair.assert_all_given_back()
    finally:
        pair.close()
