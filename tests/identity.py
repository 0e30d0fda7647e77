"""A model's identity, where any will do."""

from __future__ import annotations

from engine.types import ModelId, Numbers

MODEL_ID = ModelId(
    fingerprint="0123456789abcdef",
    numbers=Numbers(weights="float32", kv="float32", index_keys="float32"),
)
