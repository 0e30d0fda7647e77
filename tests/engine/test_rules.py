from __future__ import annotations

import json

import pytest
import torch

from engine.config import WorkerConfig
from engine.loading import load_engine
from engine.rules import RuleError, check_rules

CPU = torch.device("cpu")


class Sparse:
    index_topk = 16
    index_head_dim = 24


class Dense:
    pass


def config(**options) -> WorkerConfig:
    return WorkerConfig(model="m", listen_address="", **options)


@pytest.mark.parametrize(
    ("options", "model", "said"),
    [
        (
            {"shared_kv": True},
            Dense,
            "--enable-nsa-prefill-cp-shared-kv needs a context-parallel group: give "
            "--prefill-cp-size 2 or more (it is 1)",
        ),
        (
            {"role": "decode", "cp_size": 2},
            Dense,
            "--prefill-cp-size 2, --enable-nsa-prefill-cp-shared-kv: decode workers hold the "
            "whole KV on one rank; give these flags to prefill groups only",
        ),
        (
            {"role": "decode", "shared_kv": True},
            Dense,
            "--prefill-cp-size 1, --enable-nsa-prefill-cp-shared-kv: decode workers hold the "
            "whole KV on one rank; give these flags to prefill groups only",
        ),
        ({"cp_size": 0}, Dense, "--prefill-cp-size 0: a group has 1 to 64 ranks"),
        (
            {"cp_size": 2, "cp_mode": "zigzag"},
            Dense,
            "--nsa-prefill-cp-mode zigzag: accepted are in-seq-split, round-robin-split",
        ),
        (
            {"cp_size": 2, "cp_stream_block_tokens": 0},
            Dense,
            "--cp-stream-block-tokens 0: accepted is 1 or more",
        ),
        (
            {"page_size": 32},
            Sparse,
            "--page-size 32: models with a lightning indexer need 64",
        ),
        (
            {"index_cache_dtype": "fp8_e4m3"},
            Dense,
            "--index-cache-dtype fp8_e4m3: this model has no lightning indexer; leave it out",
        ),
        (
            {"index_cache_dtype": "fp8_e4m3"},
            Sparse,
            "--index-cache-dtype fp8_e4m3: the model's index_head_dim is 24, and keys in fp8 need "
            "a multiple of 16; leave it out",
        ),
        (
            {"cp_size": 2, "hicache_storage_backend": "file"},
            Dense,
            "--hicache-storage-backend file: a storage backend does not work with KV shared by "
            "--prefill-cp-size 2 ranks yet; leave it out, or add "
            "--no-enable-nsa-prefill-cp-shared-kv",
        ),
        (
            {"hicache_storage_backend": "file"},
            Dense,
            "--hicache-storage-backend file: there is no storage backend yet; leave it out",
        ),
    ],
)
def test_what_does_not_go_together_is_named_with_what_would(options, model, said):
    with pytest.raises(RuleError) as error:
        check_rules(config(**options), model(), CPU)
    assert str(error.value) == said


@pytest.mark.parametrize(
    "options",
    [{}, {"cp_size": 4}, {"cp_size": 2, "shared_kv": False}, {"page_size": 64}, {"role": "decode"}],
)
def test_what_goes_together_passes(options):
    check_rules(config(**options), Sparse(), CPU)


def test_a_dense_model_may_have_another_page_size():
    check_rules(config(page_size=16), Dense(), CPU)


def test_rules_are_checked_before_any_weight_is_read(tmp_path):
    """The folder has no weights at all."""
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(RuleError, match="--prefill-cp-size"):
        load_engine(WorkerConfig(model=str(tmp_path), listen_address="", shared_kv=True))
