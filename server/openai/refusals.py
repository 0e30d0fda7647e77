"""Fields that other servers or models act on and this one does not. An answer that ignored them
would look like one that kept to them, so they are refused by name. Knows no route: a field that a
route does read never gets here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from server.openai.errors import unsupported

# Beside null: the values that ask for what happens anyway, as clients send them for defaults.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # What holds the answer to a form or to some words.
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structured_outputs": ({},),
    "structural_tag": (),
    "guided_json": (),
    "guided_json_object": (False,),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": ("",),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop_regex": ([],),
    # What makes another prompt, or has another model read it.
    "chat_template": (),
    "documents": ([],),
    "web_search_options": (),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "input_embeds": (),
    "lora_path": (),
    "cache_salt": (),  # a prefix of one's own: here all clients share the cached ones
    # How tokens are chosen.
    "best_of": (1,),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "repeat_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    # What the answer shows.
    "modalities": ([], ["text"]),
    "audio": (),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    # Envelopes that may hold any of these: what is in them is read by no one.
    "extra_body": ({},),
    "nvext": ({},),
}
_SWITCHES = {"tools": "tool_choice", "functions": "function_call"}  # "none" turns them off


def check(given: Mapping[str, Any]) -> None:
    """`given`: the fields of a body that its route does not read. Raises APIError 400."""
    for name, value in given.items():
        if value is None or name not in NEUTRAL or _without_nulls(value) in NEUTRAL[name]:
            continue
        if name in _SWITCHES and given.get(_SWITCHES[name]) == "none":
            continue
        accepted = [msgspec.json.encode(one).decode() for one in (*NEUTRAL[name], None)]
        raise unsupported(name, f"; accepted is {' or '.join(accepted)}")


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if item is not None}
    return value
