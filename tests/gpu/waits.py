"""That a step does not wait for the device."""

from __future__ import annotations

import pytest
import torch

from engine.runner import Runner


def never_waits(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """From here on this part of a step fails where it waits for the device."""
    compute = getattr(Runner, step)

    def strict(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return compute(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Runner, step, strict)
