"""Whether the default model is what it was made from: divergence, greedy text and selection.

    python benchmarks/default_model.py [--home DIR] [--out FILE]

Everything is computed by transformers on the CPU, in float32 but for bfloat16_divergence and
bfloat16_agreement. Prints a table, writes JSON, and ends with code 1 where the conversion is not
exact.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.pull.cache import default_home
from engine.pull.convert import convert, deepseek_config
from engine.pull.default_model import (
    CALIBRATION_TEXT,
    NUM_CALIBRATION_TOKENS,
    ensure_default_model,
    source_folder,
)
from engine.pull.llama import LlamaGguf
from engine.pull.report import Report
from engine.pull.source import SMOLLM2, obtain
from tests.engine.pull import oracle

TOPKS = (64, 128, 256, 512)
MAX_DIVERGENCE = 1e-5  # float32; a wrong row order or scale gives more than 0.1
NUM_TOKENS = 1536


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the default model against its source.")
    parser.add_argument("--home", type=Path, default=default_home())
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "default_model.json"
    )
    options = parser.parse_args()
    result = measure(options.home)
    table = Table("measure", "value")
    for name, value in result.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    exact = result["float32_divergence"] < MAX_DIVERGENCE and result["float32_agreement"] == 1.0
    if not exact or not result["float32_greedy_40_equal"]:
        print("the conversion is not exact; nothing is written", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(home: Path) -> dict[str, Any]:
    folder = ensure_default_model(home)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = oracle.prose(10_000)
    ids = tokenizer.encode(text).ids[:NUM_TOKENS]
    source = LlamaGguf(obtain(SMOLLM2, source_folder(home), None, Report()))
    original = oracle.llama(source)
    reference = oracle.log_probs(original, ids[:256])
    prompt = ids[:200]
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "text": f"pydoc_data, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}",
        "num_tokens": len(ids),
        "perplexity_llama": oracle.perplexity(original, ids),
    }
    greedy = oracle.greedy(original, prompt, 40)
    del original

    calibration = tokenizer.encode(CALIBRATION_TEXT.read_text()).ids[:NUM_CALIBRATION_TOKENS]
    with torch.no_grad():
        exact = oracle.deepseek(convert(source, calibration), deepseek_config(source.config))
    log_probs = oracle.log_probs(exact, ids[:256])
    result["float32_divergence"] = oracle.divergence(reference, log_probs)
    result["float32_agreement"] = oracle.agreement(reference, log_probs)
    result["float32_greedy_40_equal"] = oracle.greedy(exact, prompt, 40) == greedy
    del exact

    coarse = oracle.log_probs(oracle.load(folder, torch.bfloat16), ids[:256])
    result["bfloat16_divergence"] = oracle.divergence(reference, coarse)
    result["bfloat16_agreement"] = oracle.agreement(reference, coarse)
    rounded = oracle.load(folder)
    log_probs = oracle.log_probs(rounded, ids[:256])
    result["bfloat16_weights_divergence"] = oracle.divergence(reference, log_probs)
    result["bfloat16_weights_agreement"] = oracle.agreement(reference, log_probs)
    for topk in (*TOPKS, NUM_TOKENS):
        oracle.set_topk(rounded, topk)
        result[f"perplexity_topk_{topk}"] = oracle.perplexity(rounded, ids)
    return result


if __name__ == "__main__":
    sys.exit(main())
