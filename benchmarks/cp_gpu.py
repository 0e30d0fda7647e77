"""Context parallelism over NCCL on real-shape layers: N GPUs against one, and a prefill's time.

    python -m benchmarks.cp_gpu --size 2 --contexts 32768 131072 --json cp_gpu.json

DeepSeek-V3.2's dimensions with `--layers` layers of random weights (dense MLP: the experts do not
take part in context parallelism). Every rank runs in a process of its own, as in a group. The
correctness gate comes first: the same next-token log-probabilities and greedy token from N ranks as
from one. `--device cpu --tiny` runs the same over gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore

from benchmarks.random_models import RandomWeights
from engine.attention.group import GroupAttention
from engine.attention.paged import PagedAttention
from engine.model.deepseek import DeepseekModel
from engine.page_tables import PageTables
from engine.parallel.mesh import Mesh
from engine.plan import Extend, Start, StepPlan
from engine.runner import Runner
from engine.staging import Staging
from engine.types import SamplingParams, TokenLogprob
from kvcache.pool import KVPool

PAGE = 64
CHUNK = 8192
GATE_CONTEXT = 9000  # beyond top-k, several chunks, a multiple of nothing
TOLERANCE = {"cpu": 1e-4, "cuda": 0.05}  # of log-probabilities, float32 and bfloat16


class Config(SimpleNamespace):
    """Stands for a transformers config."""

    def standardize_rope_params(self) -> None:
        """They are standard."""


def model_config(layers: int, tiny: bool) -> Any:
    """DeepSeek-V3.2's config, or a small one of the same build."""
    size: dict[str, Any] = (
        {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "q_lora_rank": 32}
        | {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
        | {"index_n_heads": 32, "index_head_dim": 32, "index_topk": 128, "vocab_size": 512}
        if tiny
        else {"hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128}
        | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64}
        | {"index_head_dim": 128, "index_topk": 2048, "vocab_size": 129280}
    )
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32}
    rope |= {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope |= {"original_max_position_embeddings": 4096}
    return Config(
        **size,
        num_hidden_layers=layers,
        num_key_value_heads=size["num_attention_heads"],
        first_k_dense_replace=layers,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=True,
        max_position_embeddings=163840,
        context_length=163840,
        rope_parameters=rope,
        rope_scaling=rope,
        rope_theta=10000.0,
        model_type="deepseek_v32",
    )


def prefill(runner: Runner, context: int, num_pages: int) -> tuple[float, TokenLogprob | None]:
    """One prompt in chunks; seconds, and what came out (on rank 0)."""
    generator = torch.Generator().manual_seed(context)
    token_ids = torch.randint(0, 500, (context,), generator=generator).tolist()
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    start = Start(req_index=0, sampling=sampling, prompt_ids=[])
    found = None
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    began = time.perf_counter()
    for step, at in enumerate(range(0, context, CHUNK)):
        end = min(at + CHUNK, context)
        extend = Extend(
            req_index=0,
            token_ids=token_ids[at:end],
            start=at,
            pages=list(range(1, num_pages + 1)) if at == 0 else [],
            samples=end == context,
        )
        plan = StepPlan(
            step=step,
            finished=[0] if at == 0 else [],
            starts=[start] if at == 0 else [],
            extends=[extend],
        )
        result = runner.execute(plan)
        if result.sampled and result.sampled[0].logprob is not None:
            found = result.sampled[0].logprob
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    return time.perf_counter() - began, found


def build(
    mesh: Mesh, model: DeepseekModel, contexts: list[int], block_tokens: int, dtype: torch.dtype
) -> tuple[Runner, GroupAttention | PagedAttention, int]:
    num_pages = -(-max(contexts) // PAGE)
    per_rank = -(-num_pages // mesh.size)
    pool = KVPool.create(
        model.geometry, PAGE, per_rank, dtype, mesh.device, cp_size=mesh.size, cp_rank=mesh.rank
    )
    attention: GroupAttention | PagedAttention
    if mesh.size == 1:
        attention = PagedAttention(pool, block_tokens)
    else:
        attention = GroupAttention(pool, mesh, block_tokens)
    runner = Runner(
        model,
        attention.begin,
        mesh,
        "in-seq-split",
        tables=PageTables(1, num_pages, mesh.device),
        staging=Staging(mesh.device),
        page_size=PAGE,
    )
    return runner, attention, num_pages


def measure(
    mesh: Mesh, model: DeepseekModel, args: argparse.Namespace, dtype: torch.dtype
) -> list[dict[str, Any]]:
    contexts = [GATE_CONTEXT if not args.tiny else 700, *args.contexts]
    rows = []
    for block in args.blocks:
        runner, attention, num_pages = build(mesh, model, contexts, block, dtype)
        prefill(runner, min(contexts), num_pages)  # warm up
        for context in contexts:
            gathered, waited = mesh.gathered_bytes, mesh.wait_s
            seconds, logprob = prefill(runner, context, num_pages)
            rows.append(
                {
                    "size": mesh.size,
                    "context": context,
                    "block_tokens": block,
                    "seconds": seconds,
                    "tokens_per_s": context / seconds,
                    "workspace_bytes": attention.workspace_bytes,
                    "gathered_bytes": mesh.gathered_bytes - gathered,
                    "wait_s": mesh.wait_s - waited,
                    "token": logprob.token_id if logprob else None,
                    "top": dict(logprob.top) if logprob else None,
                }
            )
            if mesh.rank == 0:
                shown = {k: v for k, v in rows[-1].items() if k != "top"}
                print(json.dumps(shown), flush=True)
    return rows


def rank_main(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = DeepseekModel.load(
        model_config(args.layers, args.tiny),
        RandomWeights(device, dtype),  # type: ignore[arg-type]
    )
    found = []
    if rank == 0:
        found += measure(Mesh(0, 1, device), model, args, dtype)
    store = TCPStore("127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False)
    mesh = Mesh(rank, size, device, store)
    found += measure(mesh, model, args, dtype)
    mesh.close()
    if rank == 0:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--blocks", type=int, nargs="+", default=[32768])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", default="cp_gpu.json")
    args = parser.parse_args()
    mp.spawn(rank_main, args=(args.size, 29517, args), nprocs=args.size)
    rows = json.loads(Path(args.json).read_text())
    alone = {(r["context"], r["block_tokens"]): r for r in rows if r["size"] == 1}
    is_equal = True
    for row in rows:
        if row["size"] == 1:
            continue
        one = alone[row["context"], row["block_tokens"]]
        common = row["top"].keys() & one["top"].keys()
        error = max(abs(row["top"][t] - one["top"][t]) for t in common)
        is_gate = error <= TOLERANCE[args.device] and len(common) >= 10
        is_equal &= is_gate
        speedup = one["seconds"] / row["seconds"]
        print(
            f"context {row['context']}, blocks of {row['block_tokens']}: {row['size']} ranks "
            f"{row['seconds']:.2f} s, one {one['seconds']:.2f} s ({speedup:.2f} x); "
            f"max error {error:.2g} over {len(common)} tokens, greedy "
            f"{'equal' if row['token'] == one['token'] else 'DIFFERS'}"
        )
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
