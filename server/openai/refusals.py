"""Fields that other servers or models act on and this one does not. An answer that ignored them
would look like one that kept to them, so they are refused by name. Knows no route: a field that a
route does read never gets here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
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
    "regex_pattern": ("",),
    "grammar_string": ("",),
    "format": ("",),
    "allowed_token_ids": (),
    "allowed_tokens": ([], ""),
    "bad_words": ([],),
    "banned_strings": ([], ""),
    "banned_tokens": ([], ""),
    "custom_token_bans": ([], ""),
    # Where it ends.
    "n_predict": (),
    "num_predict": (),
    "max_new_tokens": (),
    "max_length": (),
    "max_output_tokens": (),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "stop_regex": ([],),
    "stop_sequence": ([], ""),
    "stop_sequences": ([],),
    "ban_eos_token": (False,),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "thinking_budget_tokens": (-1,),
    "reasoning_budget_tokens": (-1,),
    # What makes another prompt, or has another model read it.
    "chat_template": (),
    "prompt_template": (),
    "template": ("",),
    "template_vars": ({},),
    "system": ("",),
    "guideline": (),
    "response_prefix": ("",),
    "negative_prompt": ("",),
    "cfg_scale": (1,),
    "guidance_scale": (1,),
    "enable_thinking": (),
    "thinking": (),
    "think": (),
    "reasoning": ({},),
    "task": (),
    "add_bos_token": (True,),
    "add_special_tokens": (False,),  # to what a chat's template makes
    "token_healing": (False,),
    "documents": ([],),
    "images": ([],),
    "image_data": ([],),
    "web_search_options": (),
    "truncate_prompt_tokens": (),
    "truncate": (),
    "input_ids": (),
    "session_params": ({},),
    "prompt_embeds": (),
    "input_embeds": (),
    "lora": ([],),
    "lora_path": (),
    "adapter_id": ("",),
    "cache_salt": (),  # a prefix of one's own: here all clients share the cached ones
    "extra_key": (),  # the same
    # How tokens are chosen.
    "best_of": (1,),
    "n_cmpl": (1,),
    "do_sample": (True,),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "samplers": (),
    "repeat_penalty": (1,),
    "rep_pen": (1,),
    "repeat_last_n": (-1,),
    "penalty_range": (-1,),
    "repetition_range": (-1,),
    "repetition_penalty_range": (-1,),
    "rep_pen_range": (-1,),
    "repetition_decay": (0,),
    "no_repeat_ngram_size": (0,),
    "min_keep": (0, 1),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "tfs": (1,),
    "tfs_z": (1,),
    "typical": (1,),
    "typical_p": (1,),
    "skew": (0,),
    "smoothing_factor": (0,),
    "adaptive_target": (-1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "temperature_last": (False,),
    "dynatemp_range": (0,),
    "min_temp": (1,),
    "max_temp": (1,),
    "dynatemp_low": (1,),
    "dynatemp_high": (1,),
    "watermark": (False,),
    "watermarking": (False,),
    # What the answer shows.
    "modalities": ([], ["text"]),
    "audio": (),
    "echo": (False,),
    "suffix": ("",),
    "return_full_text": (False,),
    "response_fields": ([],),
    "details": (False,),
    "top_logprobs": (0,),  # of chats
    "n_probs": (0,),
    "top_n_tokens": (0,),
    "top_logprobs_num": (0,),
    "return_logprob": (False,),
    "logprob_token_ids": (),
    "token_ids_logprob": (),
    "post_sampling_probs": (False,),
    "prompt_logprobs": (),
    "decoder_input_details": (False,),
    "include_reasoning": (True,),
    "separate_reasoning": (False,),
    "stream_reasoning": (True,),
    "reasoning_format": ("none", "auto"),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "return_tokens": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_meta_info": (False,),
    # Envelopes that may hold any of these: what is in them is read by no one.
    "extra_body": ({},),
    "nvext": ({},),
    "vllm_xargs": ({},),
    "options": ({},),
    "parameters": ({},),
    "sampling_params": ({},),
}
# By the names that they have here: what others call fields that are read.
_ELSEWHERE = {
    "max_tokens": (
        "n_predict",
        "num_predict",
        "max_new_tokens",
        "max_length",
        "max_output_tokens",
    ),
    "min_tokens": ("min_new_tokens", "min_length"),
    "stop": ("stop_sequence", "stop_sequences"),
    "ignore_eos": ("ban_eos_token",),
    "n": ("n_cmpl",),
    "repetition_penalty": ("repeat_penalty", "rep_pen"),
    "logprobs": ("n_probs", "top_n_tokens", "top_logprobs_num", "top_logprobs"),
    "chat_template_kwargs": ("template_vars", "enable_thinking", "thinking", "think"),
}
_HERE = {name: here for here, names in _ELSEWHERE.items() for name in names}
_SWITCHES = {"tools": "tool_choice", "functions": "function_call"}  # "none" turns them off


def check(given: Mapping[str, Any], read: Container[str]) -> None:
    """`given`: the fields of a body that its route does not read; `read`: the names of those that
    it does. Raises APIError 400."""
    for name, value in given.items():
        if value is None or name not in NEUTRAL or _without_nulls(value) in NEUTRAL[name]:
            continue
        if name in _SWITCHES and given.get(_SWITCHES[name]) == "none":
            continue
        accepted = [msgspec.json.encode(one).decode() for one in (*NEUTRAL[name], None)]
        here = f"; here it is {_HERE[name]}" if _HERE.get(name) in read else ""
        raise unsupported(name, f"; accepted is {' or '.join(accepted)}{here}")


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if item is not None}
    return value
