"""From --model to a local folder, before serving begins: the default model, a folder, a hub id.

Owns what may be fetched and when. Knows nothing of a model's contents beyond its config.json.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from server.options.config import DEFAULT_MODEL
from server.supervisor import PACKAGE_ROOT

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


class ModelSourceError(Exception):
    """A model that is not here and cannot be fetched; the message says what would be accepted."""


def resolve(model: str) -> Path:
    """The local folder of `model`, fetching it where needed.

    Raises ModelSourceError for a name that is neither the default model, a model folder nor a hub
    id, and for a fetch that failed.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelSourceError(f"--model {model}: the folder holds no config.json")
        return folder.resolve()
    if model == DEFAULT_MODEL:
        from engine.pull import cache

        path = cache.default_model_path()
        return path if cache.is_complete(path) else pull_default()
    if _HUB_ID.fullmatch(model):
        return fetch_from_hub(model)
    raise ModelSourceError(
        f"--model {model}: no such folder; expected a model's folder, a Hugging Face hub id"
        f" (owner/name) or {DEFAULT_MODEL}"
    )


def pull_default(options: Sequence[str] = ()) -> Path:
    """Make the default model in a process of its own: the front end never loads torch.

    `options` go to `python -m engine.pull`, paths absolute; its progress and errors appear on
    stderr. Raises ModelSourceError.
    """
    command = [sys.executable, "-m", "engine.pull", *options]
    if "--home" not in options:
        from engine.pull import cache

        command += ["--home", str(cache.default_home().absolute())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PACKAGE_ROOT) as pulling:
        try:
            printed, _ = pulling.communicate()
        except BaseException:
            pulling.terminate()  # it removes its half-written files
            raise
    lines = printed.strip().splitlines()
    if pulling.returncode != 0 or not lines:
        raise ModelSourceError(
            f"--model {DEFAULT_MODEL}: could not be made (engine.pull ended with code"
            f" {pulling.returncode}; its error is above)"
        )
    return Path(lines[-1])


def fetch_from_hub(model: str) -> Path:
    """The snapshot of a hub model in the hub's own cache, downloaded where it is not complete."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    where = f"--model {model}"
    try:
        path = huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES)
    except GatedRepoError as error:
        raise ModelSourceError(
            f"{where}: its owner grants access one by one; ask on the model's page, then log in"
            " with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelSourceError(
            f"{where}: no local folder and no model of the hub has this name"
        ) from error
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelSourceError(
            f"{where}: no local folder, and the hub could not be reached: {reason}"
        ) from error
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelSourceError(f"{where}: the hub's model holds no config.json")
    return folder
