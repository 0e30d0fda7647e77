"""What the Dockerfile promises to those who run its images: read, not built."""

from __future__ import annotations

import re

import pytest

from kvcache.transfer import system
from server.config import ServeConfig
from server.verbs import _parser
from tests.image import dockerfile
from tests.image.dockerfile import ROOT

FILE = dockerfile.read()
TARGETS = ("cpu", "gpu")


def packages_of(stage: dockerfile.Stage) -> set[str]:
    """What apt-get installs in a stage."""
    found: set[str] = set()
    for command in stage.all("RUN"):
        for words in re.findall(r"apt-get [^&]*\binstall\b([^&]*)", command):
            found |= {word for word in words.split() if not word.startswith("-")}
    return found


def test_both_targets_are_there_and_differ_only_in_what_they_stand_on():
    cpu, gpu = (FILE.stages[target] for target in TARGETS)
    assert cpu.base == "cpu-base" and gpu.base == "gpu-base"
    own = (cpu, "for CPUs", "cpu-build"), (gpu, "for NVIDIA GPUs", "gpu-build")
    plain = [
        [(verb, text.replace(kind, "").replace(build, "")) for verb, text in stage.instructions]
        for stage, kind, build in own
    ]
    triton = " TRITON_CACHE_MANAGER=kernels.gpu.shipped_cache:ShippedCache"
    assert plain[0] == [(verb, text.replace(triton, "")) for verb, text in plain[1]] != plain[1]


@pytest.mark.parametrize("target", TARGETS)
def test_runs_as_a_user_given_by_number_that_is_not_root(target):
    stage = FILE.stages[target]
    user = re.fullmatch(r"(\d+):(\d+)", stage.last("USER"))
    assert user and "0" not in user.groups()
    verbs = [verb for verb, _ in stage.instructions]
    assert not {"RUN", "COPY"} & set(verbs[verbs.index("USER") :])
    assert f"--uid {user[1]}" in stage.last("RUN") and f"--gid {user[2]}" in stage.last("RUN")


@pytest.mark.parametrize("target", TARGETS)
def test_the_entry_point_is_plait_under_an_init_and_the_default_is_to_serve(target):
    stage = FILE.stages[target]
    assert stage.exec_form("ENTRYPOINT")[0] == "/usr/bin/tini"
    assert stage.exec_form("ENTRYPOINT")[-1] == "/opt/plait/bin/plait"
    assert _parser().parse_args(stage.exec_form("CMD")).verb == "serve"


@pytest.mark.parametrize("target", TARGETS)
def test_every_plait_variable_is_an_option(target, monkeypatch):
    variables = FILE.stages[target].pairs("ENV")
    names = {name for name in variables if name.startswith("PLAIT_")} - {"PLAIT_HOME"}
    assert {"PLAIT_HOST", "PLAIT_PORT"} <= names
    for name in names:
        monkeypatch.setenv(name, variables[name])
    config = ServeConfig()
    assert {name.removeprefix("PLAIT_").lower() for name in names} <= config.model_fields_set
    assert config.host == "0.0.0.0" and str(config.port) in FILE.stages[target].last("EXPOSE")


@pytest.mark.parametrize("target", TARGETS)
def test_all_that_is_written_lies_on_the_volume(target):
    stage = FILE.stages[target]
    volume = stage.exec_form("VOLUME")
    variables = stage.pairs("ENV")
    assert [variables["HOME"]] == [variables["PLAIT_HOME"]] == [stage.last("WORKDIR")] == volume
    assert variables["PYTHONDONTWRITEBYTECODE"] == "1"


@pytest.mark.parametrize("target", TARGETS)
def test_no_compiler_and_no_header_in_an_image(target):
    installed = set().union(*map(packages_of, FILE.lineage(target)))
    assert not {name for name in installed if re.search(r"gcc|g\+\+|clang|make|-dev$|build-", name)}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_what_the_transfer_engine_links_to(target):
    installed = set().union(*map(packages_of, FILE.lineage(target)))
    wanted = set(system._PACKAGES.values())
    assert wanted | {"libgomp1", "tini"} <= installed
    assert target == "cpu" or set(system._CUDA_PACKAGES.values()) <= installed


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_is_a_script_that_is_in_the_image(target):
    stage = FILE.stages[target]
    options, _, command = stage.last("HEALTHCHECK").partition("CMD ")
    assert "--start-period=" in options
    script = command.strip("[]").split(", ")[-1].strip('"')
    copied = [text.split() for text in stage.all("COPY")]
    folder = next(words[-1] for words in copied if words[0] == "scripts/healthcheck.py")
    assert script == f"{folder}healthcheck.py"


@pytest.mark.parametrize("target", TARGETS)
def test_labels(target):
    prefix = "org.opencontainers.image."
    labels = FILE.stages[target].pairs("LABEL")
    wanted = ["title", "description", "licenses", "version", "revision", "created"]
    assert {prefix + name for name in wanted} <= set(labels)
    assert labels[f"{prefix}licenses"] == "Apache-2.0"
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version and FILE.stages[target].pairs("ARG")["VERSION"] == version[1]


def test_nothing_secret_is_kept():
    """Certificates, credentials and the index's address come as secrets, for one step each."""
    names = set(FILE.arguments)
    for stage in FILE.stages.values():
        names |= set(stage.pairs("ARG")) | set(stage.pairs("ENV"))
    assert not {name for name in names if re.search(r"KEY|TOKEN|SECRET|PASSW|CERT|CRED", name)}
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert not re.search(r"trusted-host|://[^/\s]*@|\.crt\b", text)
    for target in TARGETS:
        assert not [run for run in FILE.stages[target].all("RUN") if "pip" in run or "http" in run]


def test_what_is_installed_is_pinned():
    script = (ROOT / "scripts/image_environment.sh").read_text(encoding="utf-8")
    installs = re.findall(r"^ +pip install (.*)$", script, re.M)
    assert len(installs) == 4
    for install in installs:
        assert "-c constraints.txt" in install or "--no-deps" in install, install
    assert "--no-build-isolation" in installs[-1] and "--no-build-isolation" in installs[-2]
    pinned = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.M)
    for target in TARGETS:
        spec = FILE.stages[f"{target}-build"].pairs("ARG")["TORCH_SPEC"]
        assert pinned and spec == pinned[0]
        tag = FILE.arguments[f"{target.upper()}_BASE"].partition(":")[2]
        assert tag and "latest" not in tag


def test_only_what_is_listed_reaches_a_build():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    copied: set[str] = set()
    for stage in FILE.stages.values():
        for text in stage.all("COPY"):
            if "--from" not in text:
                copied |= set(text.split()[:-1]) - {"."}
    assert copied <= allowed
    assert {"server", "engine", "kvcache", "kernels"} <= allowed
