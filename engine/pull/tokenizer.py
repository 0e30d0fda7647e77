"""The source's tokenizer as files: tokenizer.json, tokenizer_config.json and the chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.pull.llama import Vocabulary


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Byte-level BPE; the "smollm" pre-tokenizer takes each digit by itself before the GPT-2
    pattern splits what is left. Raises ValueError on any other kind."""
    if vocabulary.pre_tokenizer != "smollm":
        raise ValueError(f"pre-tokenizer is {vocabulary.pre_tokenizer!r}, expected 'smollm'")
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=vocabulary.merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(vocabulary.tokens[index], normalized=False, special=True)
            for index in vocabulary.control_ids
        ]
    )
    return tokenizer


def save_tokenizer(vocabulary: Vocabulary, context_length: int, folder: Path) -> Tokenizer:
    tokenizer = build_tokenizer(vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.tokens[vocabulary.bos_id],
        "eos_token": vocabulary.tokens[vocabulary.eos_id],
        "unk_token": vocabulary.tokens[vocabulary.unk_id],
        "pad_token": vocabulary.tokens[vocabulary.pad_id],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": vocabulary.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(vocabulary.chat_template)
    return tokenizer
