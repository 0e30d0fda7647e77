"""The values that cross the border between the front end and a worker.

Owns the request as data. Knows no HTTP, no text and no tensor: token ids only.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
Role = Literal["colocated", "prefill", "decode"]


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """The kinds of number that a model is computed with."""

    weights: str  # in memory: float32, bfloat16 or float16
    keeps_fp8: bool = False  # but for those that the checkpoint has in block fp8
    kv: str  # of KV rows and activations
    index_keys: str  # of the indexer's keys in the KV pool

    @property
    def names(self) -> list[str]:
        """The weights' kind, and each other one that does not follow from it."""
        names = [self.weights]
        if self.keeps_fp8:
            names.append("fp8_e4m3-weights")
        if self.kv != self.weights:
            names.append(f"{self.kv}-kv")
        if self.index_keys != self.kv:
            names.append(f"{self.index_keys}-index-keys")
        return names

    def __str__(self) -> str:
        return ", ".join(self.names)


class ModelId(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker computes with. Tokens of a request continue each other only where it is equal:
    other weights, or the same in other numbers, would go on with another answer."""

    fingerprint: str  # of its folder: see engine.model.fingerprint
    numbers: Numbers
    rope_context: int = 0  # the shortest served one with its frequencies; 0: any

    @property
    def names(self) -> list[str]:
        """All but the fingerprint."""
        context = [f"{self.rope_context}-context"] if self.rope_context else []
        return [*self.numbers.names, *context]

    def __str__(self) -> str:
        return f"{self.fingerprint} in {', '.join(self.names)}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are chosen. Validated at the HTTP edge; the sampler trusts it.

    Sampling is a pure function of (logits, these values, position), so a replay continues exactly.
    """

    max_tokens: int  # tokens to generate at most; 0 evaluates the prompt only
    min_tokens: int = 0  # before this many, stop_token_ids are masked
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0  # on output tokens
    presence_penalty: float = 0.0  # on output tokens
    repetition_penalty: float = 1.0  # on prompt and output tokens
    logit_bias: dict[int, float] = {}
    seed: int = 0  # 0 <= seed < 2**63; the front end draws one where the client gave none
    # Generation ends at any of these. The front end puts EOS here unless ignore_eos was asked.
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # alternatives to report beside each output token; None: none
    prompt_logprobs: int | None = None  # the same for the prompt's tokens


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `rid` is unique for ever; `priority`: larger runs earlier; the
    prompt's prefix stays cached for `pin_s` seconds at least, 0: as long as there is room."""

    rid: str
    token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    pin_s: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural log, of the raw distribution) of a token and of the likeliest."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class TokenOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of a request. `index` is the place of ids[0] in the answer: the front end orders
    by it and drops what it already has. Exactly one TokenOut of a request has a finish_reason."""

    rid: str
    index: int
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []  # as long as ids where asked for, else empty
    finish_reason: FinishReason | None = None
    stop_token: bool = False  # ids[-1] is the stop token that ended it: counted, not shown
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    cached_host_tokens: int = 0  # those of them that were loaded back from the host tier for it
    # first output only, where asked for: one entry a prompt token, null for the first
    prompt_logprobs: list[TokenLogprob | None] = []
    error: str = ""  # with finish_reason "error": what happened, for the client
    attempt: int = 0  # of the Submit that this answers


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load as its scheduler sees it; all sizes logical."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    locked_pages: int = 0
    fenced_pages: int = 0  # given up, but bytes may still come into them
    num_rooms: int = 0  # hand-offs under way
    total_host_pages: int = 0  # 0: no host tier
    free_host_pages: int = 0
    is_draining: bool = False


# Labels of a pool's shape; the last two are the first two under the names that the inference
# extension of Kubernetes' Gateway API reads.
CACHE_INFO_LABELS = ("page_size", "num_pages", "block_size", "num_gpu_blocks")


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """One Prometheus family as a worker reports it; the front end adds the worker's label."""

    name: str
    kind: str  # counter, gauge or histogram
    help: str
    samples: list[MetricSample]
