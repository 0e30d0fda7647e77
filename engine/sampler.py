"""Sampling as a pure function of (logits, parameters, seed, position).

What is random in a draw (kernels.sampling) comes from the request's seed and the position alone; a
request replayed on any worker, in any batch, continues exactly. Owns the token counts that
penalties need. Knows no scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.types import SamplingParams, TokenLogprob
from kernels.sampling import Draw, draw, mix

_MASK = (1 << 64) - 1
_GREEDY_BELOW = (
    1e-6  # temperatures; dividing by less overflows, and draws nothing but the likeliest
)


def draw_key(seed: int, position: int) -> int:
    """64 bits: what is random in the draw of the token at this position."""
    return mix(mix(seed & _MASK) + position & _MASK)


@dataclass(slots=True, eq=False)
class SamplingState:
    """What the sampler remembers of one running request."""

    params: SamplingParams
    num_prompt: int
    num_output: int
    bias: torch.Tensor | None  # [V]
    prompt_seen: torch.Tensor | None  # [V] bool
    output_counts: torch.Tensor | None  # [V] float32
    held_back: torch.Tensor | None  # [num_stop_tokens] int64: none of these before min_tokens

    @classmethod
    def new(
        cls,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> SamplingState:
        bias = prompt_seen = output_counts = held_back = None
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
        # A tokenizer's end may lie beyond the vocabulary that the model has rows for.
        stops = [t for t in params.stop_token_ids if t < vocab_size]
        if params.min_tokens and stops:
            held_back = torch.tensor(stops, dtype=torch.int64, device=device)
        lengths = len(prompt_ids), len(output_ids)
        return cls(params, *lengths, bias, prompt_seen, output_counts, held_back)

    def draw(self, later: int = 0) -> Draw:
        """How the next token is drawn, or the one `later` places after it."""
        params = self.params
        if params.temperature < _GREEDY_BELOW:
            return Draw()
        key = draw_key(params.seed, self.num_prompt + self.num_output + later)
        return Draw(key, params.temperature, params.top_k, params.top_p, params.min_p)

    @property
    def edits_logits(self) -> bool:
        return (
            self.bias is not None
            or self.output_counts is not None
            or self.num_output < self.params.min_tokens
        )

    @property
    def is_plain(self) -> bool:
        """From here on its tokens are drawn of the logits as they are, and no more is asked."""
        return not self.edits_logits and self.params.logprobs is None

    @property
    def ends_with_next(self) -> bool:
        """The next token is the last that was asked for."""
        return self.num_output + 1 >= self.params.max_tokens

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
        if self.num_output < params.min_tokens and self.held_back is not None:
            logits.index_fill_(0, self.held_back, -torch.inf)
        return logits

    def append(self, token_id: int) -> None:
        self.num_output += 1
        if self.output_counts is not None:
            self.output_counts[token_id] += 1


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """One token for each row of `logits` [S, V] float32; each row's result depends on it alone.

    Order: logit_bias, penalties, temperature, top_k, top_p, min_p.
    """
    tokens: list[int] = sample_on_device(logits, states).tolist()
    return tokens


def sample_on_device(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    """The same as [S] int64 where the logits are; a GPU is not waited for."""
    edited = [i for i, state in enumerate(states) if state.edits_logits]
    if edited:
        logits = logits.clone()
        for i in edited:
            logits[i] = states[i].edit(logits[i])
    return draw(logits, [state.draw() for state in states])


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
