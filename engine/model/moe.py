"""The mixture of experts of one DeepSeek layer: gate, routed experts, shared experts."""

from __future__ import annotations

from typing import Any

import torch

from engine.model.layers import Mlp
from engine.model.weights import Checkpoint
from kernels.block_fp8 import Weight
from kernels.linear import linear, norm_linear
from kernels.moe import add_moe_
from kernels.norm import rms_norm
from kernels.route import sigmoid_gate, softmax_gate


class Gate:
    """Router logits and the choice, in float32 whatever the checkpoint's dtype."""

    def __init__(self, config: Any, checkpoint: Checkpoint, prefix: str) -> None:
        num_experts = config.n_routed_experts
        self.top_k: int = config.num_experts_per_tok
        self.n_group: int = config.n_group or 1
        self.topk_group: int = config.topk_group or 1
        self.norm_topk_prob = bool(config.norm_topk_prob)
        self.routed_scaling_factor: float = config.routed_scaling_factor
        shape = (num_experts, config.hidden_size)
        self.weight = checkpoint.get(f"{prefix}.weight", shape, torch.float32)
        self.bias = None
        if config.model_type == "deepseek_v2":
            self.n_group = _v2_groups(config)
        else:
            name = f"{prefix}.e_score_correction_bias"
            self.bias = checkpoint.get(name, (num_experts,), torch.float32)
        if num_experts % self.n_group:
            raise ValueError(f"n_group {self.n_group} must divide n_routed_experts {num_experts}")

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Router logits [T, n_routed_experts] -> expert ids [T, top_k] int64 and their weights
        [T, top_k] float32."""
        groups = (self.n_group, self.topk_group)
        normalise, factor = self.norm_topk_prob, self.routed_scaling_factor
        if self.bias is None:
            return softmax_gate(logits, self.top_k, *groups, normalise=normalise, factor=factor)
        return sigmoid_gate(
            logits, self.bias, self.top_k, *groups, normalise=normalise, factor=factor
        )


def _v2_groups(config: Any) -> int:
    groups = {"greedy": 1, "group_limited_greedy": config.n_group or 1}
    if config.topk_method not in groups:
        raise ValueError(
            f"topk_method {config.topk_method!r} is not supported; accepted are {', '.join(groups)}"
        )
    return int(groups[config.topk_method])


class Moe:
    """Routed experts, weighted, plus the shared experts unscaled."""

    def __init__(self, config: Any, checkpoint: Checkpoint, prefix: str) -> None:
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config, checkpoint, f"{prefix}.gate")
        self.w13, self.w2 = _load_experts(
            checkpoint, f"{prefix}.experts", config.n_routed_experts, hidden, intermediate
        )
        self.shared_experts = None
        if config.n_shared_experts:
            shared = intermediate * config.n_shared_experts
            self.shared_experts = Mlp.load(checkpoint, f"{prefix}.shared_experts", hidden, shared)

    def add_to(self, h: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """h [T, hidden_size] plus the experts' output for rms_norm(h), in place."""
        x, logits = self._route(h, norm, eps)
        ids, weights = self.gate(logits)
        shared = self.shared_experts
        own = None if shared is None else (shared.gate_up_proj, shared.down_proj)
        return add_moe_(h, x, self.w13, self.w2, ids, weights, own)

    def _route(
        self, h: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """rms_norm(h) and the router logits [T, n_routed_experts] float32."""
        if h.dtype == torch.float32:
            return norm_linear(h, norm, eps, self.gate.weight)
        x = rms_norm(h, norm, eps)
        return x, linear(x.float(), self.gate.weight)


def _load_experts(
    checkpoint: Checkpoint, prefix: str, num_experts: int, hidden: int, intermediate: int
) -> tuple[Weight, Weight]:
    """w13 [E, 2 · intermediate, hidden] (gate rows first) and w2 [E, hidden, intermediate], from
    one tensor an expert and projection as published, or from the fused form."""
    w13_shape = (num_experts, 2 * intermediate, hidden)
    w2_shape = (num_experts, hidden, intermediate)
    if checkpoint.has(f"{prefix}.gate_up_proj"):
        return (
            checkpoint.get(f"{prefix}.gate_up_proj", w13_shape),
            checkpoint.get(f"{prefix}.down_proj", w2_shape),
        )
    own = [f"{prefix}.{expert}" for expert in range(num_experts)]
    gates_and_ups = [
        (f"{name}.{half}.weight", intermediate) for name in own for half in ("gate_proj", "up_proj")
    ]
    downs = [(f"{name}.down_proj.weight", hidden) for name in own]
    return (
        checkpoint.weight(gates_and_ups, hidden).view(*w13_shape),
        checkpoint.weight(downs, intermediate).view(*w2_shape),
    )
