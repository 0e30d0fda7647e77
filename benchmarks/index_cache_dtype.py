"""What index keys in fp8 change in what a model reads and says: the default model over a real text.

    python -m benchmarks.index_cache_dtype [--tokens 700] [--output FILE]

Overlap: of what each query beyond index_topk selects by float32 keys, the share that it also
selects by keys and queries in fp8 (and, to compare, in bfloat16), from the same hidden states.
Divergence: of the next token's distribution, KL in nats, when all layers of a forward select so.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from tokenizers import Tokenizer

from engine.attention.paged import PagedAttention, PagedForward, TopK
from engine.batch import ForwardBatch
from engine.model.base import Model
from engine.model.registry import load_model, resolve_dtype
from engine.pull.default_model import ensure_default_model
from kernels.fp8_keys import Fp8Keys
from kernels.index_logits import index_logits
from kernels.topk import exact_topk
from kvcache.pool import KVPool
from tests.engine.pull import oracle

PAGE = 64
CPU = torch.device("cpu")


class Watched:
    """Attention that compares each layer's choice by float32 keys with those by smaller ones."""

    def __init__(self, inner: PagedForward, pool: KVPool, num_tokens: int) -> None:
        self._inner, self._pool, self._num = inner, pool, num_tokens
        self.overlaps: dict[str, list[torch.Tensor]] = {"fp8_e4m3": [], "bfloat16": []}

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def select(self, layer: int, q: torch.Tensor, weights: torch.Tensor, topk: int) -> TopK:
        keys = self._pool.index_keys(layer)
        assert isinstance(keys, torch.Tensor)
        keys, q_own, own = keys[PAGE : PAGE + self._num], q[topk:], weights[topk:]
        coarse = (q_own.bfloat16(), own, keys.bfloat16())
        want = self._chosen(index_logits(q_own, own, keys), topk)
        for name, scores in (
            ("fp8_e4m3", index_logits(q_own, own, Fp8Keys.quantised(keys))),
            ("bfloat16", index_logits(*coarse)),
        ):
            shared = (self._chosen(scores, topk) & want).sum(1)
            self.overlaps[name].append(shared / topk)
        return self._inner.select(layer, q, weights, topk)

    def _chosen(self, scores: torch.Tensor, topk: int) -> torch.Tensor:
        """bool [num_queries, L]"""
        future = torch.arange(self._num) > torch.arange(topk, self._num).unsqueeze(1)
        chosen = exact_topk(scores.masked_fill(future, -torch.inf), topk)
        return torch.zeros_like(future).scatter_(1, chosen, True)


def run(
    model: Model, ids: list[int], is_fp8: bool, is_watched: bool = False
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Log-probabilities [T, vocab] of one forward, and the overlaps by layer."""
    num, num_pages = len(ids), -(-len(ids) // PAGE)
    geometry = replace(model.geometry, fp8_index_keys=is_fp8)
    pool = KVPool.create(geometry, PAGE, num_pages, torch.float32)
    batch = ForwardBatch(
        token_ids=torch.tensor(ids),
        positions=torch.arange(num),
        out_loc=torch.arange(PAGE, PAGE + num),
        page_table=torch.arange(1, num_pages + 1).unsqueeze(0),
        starts=(0,),
        lengths=(num,),
    )
    inner = PagedAttention(pool).begin(batch)
    watched = Watched(inner, pool, num)
    attention = watched if is_watched else inner
    with torch.inference_mode():
        hidden = model.forward(batch.token_ids, batch.positions, attention)  # type: ignore[arg-type]
        return model.logits(hidden).log_softmax(-1), watched.overlaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    folder = ensure_default_model()
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(oracle.prose(20_000)).ids
    ids = ids[: args.tokens]
    model = load_model(str(folder), CPU, resolve_dtype("auto", CPU), None)
    want, overlaps = run(model, ids, is_fp8=False, is_watched=True)
    got, _ = run(model, ids, is_fp8=True)
    beyond = slice(model.index_topk, None)
    divergence = (want.exp() * (want - got)).sum(-1)[beyond]
    same = (want.argmax(-1) == got.argmax(-1))[beyond]
    result = {
        "tokens": len(ids),
        "index_topk": model.index_topk,
        "queries": len(ids) - model.index_topk,
        "layers": len(overlaps["fp8_e4m3"]),
        **{f"overlap_{name}": mean(float(o.mean()) for o in own) for name, own in overlaps.items()},
        **{
            f"overlap_{name}_worst_layer": min(float(o.mean()) for o in own)
            for name, own in overlaps.items()
        },
        **{
            f"overlap_{name}_worst_query": min(float(o.min()) for o in own)
            for name, own in overlaps.items()
        },
        "divergence_mean": float(divergence.mean()),
        "divergence_worst": float(divergence.max()),
        "same_best_token": float(same.float().mean()),
    }
    for name, value in result.items():
        print(f"{name:<32}{value:.4g}" if isinstance(value, float) else f"{name:<32}{value}")
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
