"""The names that the pages of prompts go by. A prompt of 128k tokens takes some 6 ms of Python,
which would stop the event loop if done there or in one go: long ones are hashed in a thread beside
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvcache.events import page_hashes
from server.dispatch.fleet import Capabilities
from server.router.breath import Breath

_INLINE_TOKENS = 4096  # hashed on the event loop: more would hold it up
_RUN_PAGES = 32  # some 0.1 ms


async def hash_prompts(
    prompts: Sequence[Sequence[int]], capabilities: Capabilities | None
) -> list[list[bytes]]:
    """Of each prompt's whole pages, as the workers name them; none where no worker was there yet.
    A prompt that is the one before it, and no copy, is hashed once."""
    if capabilities is None:
        return [[] for _ in prompts]
    page_size, salt = capabilities.page_size, capabilities.hash_salt.encode()
    hashes: list[list[bytes]] = []
    for i, token_ids in enumerate(prompts):
        if i and token_ids is prompts[i - 1]:  # choices of one prompt
            hashes.append(hashes[-1])
        elif len(token_ids) <= _INLINE_TOKENS:
            hashes.append(page_hashes(token_ids, page_size, salt))
        else:
            hashes.append(await asyncio.to_thread(prompt_hashes, token_ids, page_size, salt))
    return hashes


def prompt_hashes(token_ids: Sequence[int], page_size: int, salt: bytes) -> list[bytes]:
    """`kvcache.events.page_hashes`, in short runs."""
    breath = Breath(_RUN_PAGES)
    hashes: list[bytes] = []
    for start in range(0, len(token_ids), _RUN_PAGES * page_size):
        run = token_ids[start : start + _RUN_PAGES * page_size]
        hashes += page_hashes(run, page_size, salt, after=hashes[-1] if hashes else None)
        breath.after(_RUN_PAGES)
    return hashes
