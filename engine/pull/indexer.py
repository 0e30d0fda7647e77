"""A lightning indexer without training, from a layer's own queries and keys.

Each index head is an attention head: its score is the head's pre-softmax attention score, so the
top-k by their rectified sum are tokens that the layer attends to. Owns the calibrated constants
that carry this through the indexer's LayerNorm; knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_PAD_PAIRS = 31
PAD_GAIN = 8.0
RIDGE = 1e-4  # of the largest eigenvalue
LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """float32, in the checkpoint's [out_features, in_features] order."""

    wq_b: torch.Tensor  # [index_n_heads * index_head_dim, q_lora_rank]
    wk: torch.Tensor  # [index_head_dim, hidden_size]
    k_norm_weight: torch.Tensor  # [index_head_dim]
    k_norm_bias: torch.Tensor  # [index_head_dim]
    weights_proj: torch.Tensor  # [index_n_heads, hidden_size]


def build_indexer(
    q: torch.Tensor,  # [num_heads, rope_dim, q_lora_rank], half-split, zero outside a head's group
    k: torch.Tensor,  # [rope_dim, hidden_size], half-split
    inputs: torch.Tensor,  # [T, hidden_size] attention inputs of a calibration text
) -> IndexerWeights:
    """The indexer of one layer.

    The index key is [k | +pads | -pads | -sum(k) | 0]. LayerNorm subtracts the mean, which the last
    entry makes 0, and divides by the standard deviation, which the pads keep nearly constant: they
    are the input's principal components, and an RMS-normalised input has a constant length. The
    norm's weight takes that constant out again and drops the pads.
    """
    num_heads, rope_dim, rank = q.shape
    head_dim = index_head_dim(rope_dim)
    wq_b = q.new_zeros(num_heads, head_dim, rank)
    wq_b[:, :rope_dim] = q
    values, vectors = torch.linalg.eigh(inputs.double().T @ inputs.double())  # ascending
    pads = PAD_GAIN * vectors[:, -NUM_PAD_PAIRS:].T.float()
    wk = k.new_zeros(head_dim, k.shape[1])
    wk[:rope_dim] = k
    wk[rope_dim : rope_dim + NUM_PAD_PAIRS] = pads
    wk[rope_dim + NUM_PAD_PAIRS : rope_dim + 2 * NUM_PAD_PAIRS] = -pads
    wk[rope_dim + 2 * NUM_PAD_PAIRS] = -k.sum(0)
    variance = (inputs @ wk.T).var(-1, unbiased=False) + LAYER_NORM_EPS
    k_norm_weight = k.new_zeros(head_dim)
    k_norm_weight[:rope_dim] = variance.sqrt().mean()
    return IndexerWeights(
        wq_b=wq_b.flatten(0, 1),
        wk=wk,
        k_norm_weight=k_norm_weight,
        k_norm_bias=torch.zeros_like(k_norm_weight),
        weights_proj=_constant_functional(inputs, values, vectors).expand(num_heads, -1),
    )


def index_head_dim(rope_dim: int) -> int:
    """The rope key, the pads and the sum, rounded up to a multiple of 64."""
    return -(-(rope_dim + 2 * NUM_PAD_PAIRS + 1) // 64) * 64


def _constant_functional(
    inputs: torch.Tensor, values: torch.Tensor, vectors: torch.Tensor
) -> torch.Tensor:
    """[hidden_size] w with w·x close to 1 for every input: the head weights shall not depend on the
    query, and the indexer's projection has no bias to say so. Ridge regression, from the
    eigendecomposition of the inputs' second moments: a text shows few of layer 0's inputs, and
    without the ridge w is wild on the others."""
    target = vectors.T @ inputs.double().sum(0)
    w = vectors @ (target / (values + RIDGE * values[-1]))
    return w.to(inputs.dtype)
