"""How much of a GPU's memory is the KV pool's: what the weights and the largest steps leave. The
steps are run once before the pool is made, so that no later one runs out of memory; before that,
what they and smaller ones call is compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from engine.attention.local import local_attention
from engine.batch import ForwardBatch
from engine.capacity import CapacityError, gib
from engine.config import WorkerConfig
from engine.model.base import Model
from engine.sampler import LogprobRequest, SamplingState, sample, score
from engine.types import Numbers, SamplingParams
from kernels.dispatch import compiling_ahead
from kernels.streamed import workspace_bytes
from kvcache.layout import KVGeometry
from kvcache.pool import KVPool

log = logging.getLogger("plait.memory")

# Communication's and libraries' own, and what the allocator loses between its blocks.
_MARGIN_BYTES: Final = 1 << 30

Step: TypeAlias = tuple[tuple[int, ...], int]  # where each context starts; how many tokens of each


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Beside weights and pool."""

    prefill_bytes: int  # of the largest chunk, at the end of the longest context
    decode_bytes: int  # of the most decodes, each at the end of the longest context


def check_weights_fit(
    config: WorkerConfig, device: torch.device, numbers: Numbers, needed: int
) -> None:
    """Before they are read: raises CapacityError where `needed` bytes of weights, in these
    `numbers`, exceed what is free on the device."""
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise CapacityError(
            f"--model {config.model}: its weights take {gib(needed)} in "
            f"{numbers}, and {device} has {gib(free)} of "
            f"{gib(total)} free; give it a GPU with more memory, or end what else uses this one"
        )


@contextmanager
def fits(config: WorkerConfig, device: torch.device, what: str) -> Iterator[None]:
    """What runs out of the device's memory in here raises CapacityError: it was taken meanwhile by
    another process, or is in more pieces than was thought."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise CapacityError(
            f"--model {config.model}: {device}, which has {gib(free)} of {gib(total)} free, has no "
            f"room for {what} ({str(error).partition('. GPU')[0]})"
        ) from error


def free_device_bytes(
    config: WorkerConfig,
    model: Model,
    geometry: KVGeometry,  # of the KV rows
    dtype: torch.dtype,  # of the KV rows
    device: torch.device,
    context_length: int,
    chunk_size: int,
) -> int:
    """For one rank's KV pool, once the weights are loaded. Raises CapacityError where nothing is
    left."""
    began = time.perf_counter()
    remedy = (
        f"a --chunked-prefill-size below {chunk_size}, a --max-running-requests below "
        f"{config.max_running_requests} or a --context-length below {context_length}"
    )
    with fits(config, device, f"the largest steps; {remedy} makes them smaller"):
        steps = measure_steps(
            model,
            geometry,
            dtype,
            device,
            page_size=config.tokens_per_page,
            context_length=context_length,
            chunk_size=chunk_size,
            max_running=config.max_running_requests,
        )
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    reserved = int(total * (1 - config.mem_fraction_static))
    # Recorded decodes keep their memory beside what other steps use.
    taken = steps.prefill_bytes + steps.decode_bytes + _MARGIN_BYTES
    if config.cp_size > 1:  # two blocks and the scores of their torch form
        taken += 3 * workspace_bytes(device)
    left = free - reserved - taken
    log.info(
        "%s: %s of %s free beside the weights; a prefill step takes %s, a decode step %s; "
        "%s for the KV pool (found in %.1f s)",
        device,
        gib(free),
        gib(total),
        gib(steps.prefill_bytes),
        gib(steps.decode_bytes),
        gib(max(0, left)),
        time.perf_counter() - began,
    )
    if left <= 0:
        raise CapacityError(
            f"--mem-fraction-static {config.mem_fraction_static:g}: beside the weights {device} "
            f"has {gib(free)} free, of which {gib(reserved)} are to stay so, and the largest "
            f"steps take {gib(taken)}: nothing is left for the KV pool. A larger fraction (below "
            f"1), {remedy} leaves more"
        )
    return left


@torch.inference_mode()
def measure_steps(
    model: Model,
    geometry: KVGeometry,
    dtype: torch.dtype,
    device: torch.device,
    *,
    page_size: int,
    context_length: int,
    chunk_size: int,
    max_running: int,
) -> StepMemory:
    """Every context lies in the dummy page alone, so that one page is all the pool needs."""
    pool = KVPool.create(geometry, page_size, 1, dtype, device)
    for buffer in pool.buffers():
        buffer.zero_()
    attention = local_attention(pool)
    num_pages = -(-context_length // page_size)

    def run(starts: tuple[int, ...], length: int) -> torch.Tensor:
        num = len(starts) * length
        positions = torch.tensor(starts).unsqueeze(1) + torch.arange(length)
        batch = ForwardBatch(
            token_ids=torch.randint(0, model.vocab_size, (num,), device=device),
            positions=positions.flatten().to(device),
            out_loc=torch.zeros(num, dtype=torch.int64, device=device),
            page_table=torch.zeros((len(starts), num_pages), dtype=torch.int32, device=device),
            starts=starts,
            lengths=(length,) * len(starts),
        )
        hidden = model.forward(batch.token_ids, batch.positions, attention.begin(batch))
        return hidden[:max_running]

    def peak(starts: tuple[int, ...], length: int) -> int:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _sample(model, run(starts, length), device)
        return torch.cuda.max_memory_allocated(device) - before

    chunk = min(chunk_size, context_length)
    last = context_length - 1
    if (compiling := compiling_ahead(device)) is not None:
        with compiling:
            selects = bool(model.index_topk)
            largest, *others = steps_ahead(context_length, chunk, max_running, selects)
            _sample(model, run(*largest), device)
            for step in others:
                run(*step)
    prefill = peak((context_length - chunk,), chunk)
    return StepMemory(prefill, peak((last,) * max_running, 1))


def steps_ahead(context_length: int, chunk: int, max_running: int, selects: bool) -> list[Step]:
    """Steps among which every form of a kernel that others need is met, or nearly, each once:
    halves of the largest chunk, which is first, and of the most decodes, at the end of the longest
    context; where layers select, also halves of that, and decodes without a choice."""
    last = context_length - 1
    steps: list[Step] = [((context_length - length,), length) for length in _halves(chunk)]
    steps += [((last,) * num, 1) for num in _halves(max_running)]
    if selects:
        steps += [((max(0, n - chunk),), min(chunk, n)) for n in _halves(context_length)]
        steps += [((0,) * num, 1) for num in _halves(max_running)]
    return list(dict.fromkeys(steps))


def _halves(most: int) -> list[int]:
    return [most >> shift for shift in range(most.bit_length())]


def _sample(model: Model, hidden: torch.Tensor, device: torch.device) -> None:
    """As much as sampling takes: every row is edited, drawn of what may be the whole vocabulary,
    and scored."""
    params = SamplingParams(
        max_tokens=1, top_p=0.999, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=1
    )
    states = [SamplingState.new(params, [0], [], model.vocab_size, device) for _ in hidden]
    logits = model.logits(hidden)
    sample(logits, states)
    score(logits, [LogprobRequest(row, 0, 1) for row in range(len(hidden))])
