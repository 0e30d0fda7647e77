"""Sampling as a pure function of (logits, parameters, seed, position).

The only randomness is one number per token of the vocabulary, hashed from the request's seed, the
position and the token's id; a request replayed on any worker, in any batch, continues exactly. The
token drawn is the one of largest p / e with e exponentially distributed (the Gumbel-max trick):
where logits differ in their last bits, as they do between batches, a draw changes only where two
tokens all but tie. Owns the token counts that penalties need. Knows no scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.types import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GREEDY_BELOW = (
    1e-6  # temperatures; dividing by less overflows, and draws nothing but the likeliest
)
_TOP_CANDIDATES = 1024  # a nucleus is looked for among this many before the vocabulary is sorted


def exponentials(seed: int, position: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[vocab_size] float32, each exponentially distributed with mean 1: splitmix64 (Steele, Lea,
    Flood 2014) over seed, position and token id, 32 bits of it as a uniform number."""
    key = _mix(_mix(seed & _MASK) + position & _MASK)
    ids = torch.arange(vocab_size, dtype=torch.int64, device=device)
    z = ids * _signed(_GOLDEN) + _signed(key)
    z = (z ^ ((z >> 30) & (1 << 34) - 1)) * _signed(_FIRST)
    z = (z ^ ((z >> 27) & (1 << 37) - 1)) * _signed(_SECOND)
    bits = (z >> 32) & 0xFFFFFFFF
    # Small values decide a draw; they are exact here, as 32 bits near 0 fit a float.
    return -torch.log1p(-(bits.to(torch.float32) + 0.5) * 2.0**-32)


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return z - (1 << 64) if z >> 63 else z


@dataclass(slots=True, eq=False)
class SamplingState:
    """What the sampler remembers of one running request."""

    params: SamplingParams
    num_prompt: int
    num_output: int
    bias: torch.Tensor | None  # [V]
    prompt_seen: torch.Tensor | None  # [V] bool
    output_counts: torch.Tensor | None  # [V] float32

    @classmethod
    def new(
        cls,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> SamplingState:
        bias = prompt_seen = output_counts = None
        if params.logit_bias:
            bias = torch.zeros(vocab_size, device=device)
            ids = torch.tensor(list(params.logit_bias), device=device)
            bias[ids] = torch.tensor(list(params.logit_bias.values()), device=device)
        if params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0:
            output_counts = torch.bincount(
                torch.tensor(output_ids, dtype=torch.int64, device=device), minlength=vocab_size
            ).float()
        if params.repetition_penalty != 1.0:
            prompt_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            prompt_seen[torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
        return cls(params, len(prompt_ids), len(output_ids), bias, prompt_seen, output_counts)

    @property
    def edits_logits(self) -> bool:
        return (
            self.bias is not None
            or self.output_counts is not None
            or self.num_output < self.params.min_tokens
        )

    def edit(self, logits: torch.Tensor) -> torch.Tensor:
        """Bias, minimum length and penalties: [V] -> [V]."""
        params = self.params
        logits = logits.clone()
        if self.bias is not None:
            logits += self.bias
        if self.output_counts is not None:
            seen = self.output_counts > 0
            if self.prompt_seen is not None:
                penalty = params.repetition_penalty
                scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
                logits = torch.where(seen | self.prompt_seen, scaled, logits)
            logits -= params.frequency_penalty * self.output_counts
            logits -= params.presence_penalty * seen
        if self.num_output < params.min_tokens and params.stop_token_ids:
            logits[list(params.stop_token_ids)] = -torch.inf
        return logits

    def append(self, token_id: int) -> None:
        self.num_output += 1
        if self.output_counts is not None:
            self.output_counts[token_id] += 1


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """One token for each row of `logits` [S, V] float32; each row's result depends on it alone.

    Order: logit_bias, penalties, temperature, top_k, top_p, min_p.
    """
    edited = [i for i, state in enumerate(states) if state.edits_logits]
    if edited:
        logits = logits.clone()
        for i in edited:
            logits[i] = states[i].edit(logits[i])
    tokens: list[int] = logits.argmax(-1).tolist()
    random = [i for i, state in enumerate(states) if state.params.temperature >= _GREEDY_BELOW]
    if random:
        chosen = _draw(logits[random], [states[i] for i in random])
        for i, token in zip(random, chosen, strict=True):
            tokens[i] = token
    return tokens


def _draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """[R, V] -> R tokens."""
    device = logits.device
    temperature = torch.tensor([s.params.temperature for s in states], device=device)
    peak = logits.max(-1, keepdim=True).values
    probs = torch.softmax((logits - peak) / temperature[:, None], -1)
    for row, state in zip(probs, states, strict=True):
        least = _least_kept(row, state.params)
        dropped = row < least
        position = state.num_prompt + state.num_output
        row /= exponentials(state.params.seed, position, len(row), device)
        row.masked_fill_(dropped, 0.0)
    tokens: list[int] = probs.argmax(-1).tolist()
    return tokens


def _least_kept(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor | float:
    """The smallest probability that top_k, top_p and min_p keep; equal ones stay together."""
    vocab_size = probs.numel()
    top_k = min(params.top_k, vocab_size)
    if top_k <= 0 and params.top_p >= 1.0:
        return probs.max() * params.min_p if params.min_p > 0 else 0.0
    top = torch.topk(probs, top_k if top_k > 0 else min(_TOP_CANDIDATES, vocab_size)).values
    if top_k <= 0 and top.sum() < params.top_p:
        top = torch.sort(probs, descending=True).values
    least = top[-1]
    if params.top_p < 1.0:
        mass = top.sum() if top_k > 0 else 1.0
        before = top.double().cumsum(0) - top
        least = top[max(int((before < params.top_p * mass).sum()) - 1, 0)]
    return torch.maximum(least, top[0] * params.min_p)


@dataclass(slots=True)
class LogprobRequest:
    """Row `row` of the logits, the token to score and how many alternatives to list."""

    row: int
    token_id: int
    num_top: int


def score(logits: torch.Tensor, wanted: Sequence[LogprobRequest]) -> list[TokenLogprob]:
    """Log-probabilities of the raw distribution: `logits` [S, V] float32, one result each."""
    if not wanted:
        return []
    rows = torch.tensor([w.row for w in wanted], device=logits.device)
    ids = torch.tensor([w.token_id for w in wanted], device=logits.device)
    logprobs = torch.log_softmax(logits[rows], -1)
    chosen: list[float] = logprobs.gather(1, ids[:, None]).flatten().tolist()
    num_top = max(w.num_top for w in wanted)
    if num_top == 0:
        return [TokenLogprob(w.token_id, value) for w, value in zip(wanted, chosen, strict=True)]
    values, indices = (t.tolist() for t in torch.topk(logprobs, num_top, dim=-1))
    return [
        TokenLogprob(w.token_id, value, list(zip(ix, vs, strict=True))[: w.num_top])
        for w, value, ix, vs in zip(wanted, chosen, indices, values, strict=True)
    ]
