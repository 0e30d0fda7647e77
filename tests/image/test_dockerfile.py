"""What the Dockerfile promises to those who run its images: read, not built."""

from __future__ import annotations

import re

import pytest

from kvcache.transfer import system
from server.options.config import ServeConfig
from server.verbs import _parser
from tests.image import dockerfile
from tests.image.dockerfile import ROOT

FILE = dockerfile.read()
VARIANTS = ("cpu", "gpu")
IMAGE = FILE.stages["plait"]


def packages_of(stage: dockerfile.Stage) -> set[str]:
    """What apt-get installs in a stage."""
    found: set[str] = set()
    for command in stage.all("RUN"):
        for words in re.findall(r"apt-get [^&]*\binstall\b([^&]*)", command):
            found |= {word for word in words.split() if not word.startswith("-")}
    return found


def test_the_variants_differ_only_in_what_they_stand_on():
    assert FILE.arguments["VARIANT"] == "cpu"
    for variant in VARIANTS:
        roots = [FILE.lineage(name, variant)[-1] for name in ("build", "plait")]
        assert [root.base for root in roots] == [f"${{{variant.upper()}_BASE}}"] * 2
        assert not {"ENV", "COPY", "ENTRYPOINT"} & {verb for verb, _ in roots[0].instructions}
    users = [stage.name for stage in FILE.stages.values() if "${VARIANT}" in stage.base]
    assert users == ["build", "plait"]


def test_runs_as_a_user_given_by_number_that_is_not_root():
    user = re.fullmatch(r"(\d+):(\d+)", IMAGE.last("USER"))
    assert user and "0" not in user.groups()
    verbs = [verb for verb, _ in IMAGE.instructions]
    assert not {"RUN", "COPY"} & set(verbs[verbs.index("USER") :])
    assert f"--uid {user[1]}" in IMAGE.last("RUN") and f"--gid {user[2]}" in IMAGE.last("RUN")


def test_the_entry_point_is_plait_under_an_init_and_the_default_is_to_serve():
    assert IMAGE.exec_form("ENTRYPOINT")[0] == "/usr/bin/tini"
    assert IMAGE.exec_form("ENTRYPOINT")[-1] == "/opt/plait/bin/plait"
    assert _parser().parse_args(IMAGE.exec_form("CMD")).verb == "serve"


def test_every_plait_variable_is_an_option(monkeypatch):
    variables = IMAGE.pairs("ENV")
    names = {name for name in variables if name.startswith("PLAIT_")} - {"PLAIT_HOME"}
    assert {"PLAIT_HOST", "PLAIT_PORT"} <= names
    for name in names:
        monkeypatch.setenv(name, variables[name])
    config = ServeConfig()
    assert {name.removeprefix("PLAIT_").lower() for name in names} <= config.model_fields_set
    assert config.host == "0.0.0.0" and str(config.port) in IMAGE.last("EXPOSE")


def test_all_that_is_written_lies_on_the_volume():
    volume = IMAGE.exec_form("VOLUME")
    variables = IMAGE.pairs("ENV")
    assert [variables["HOME"]] == [variables["PLAIT_HOME"]] == [IMAGE.last("WORKDIR")] == volume
    assert variables["PYTHONDONTWRITEBYTECODE"] == "1"


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_compiler_and_no_header_in_an_image(variant):
    installed = set().union(*map(packages_of, FILE.lineage("plait", variant)))
    assert not {name for name in installed if re.search(r"gcc|g\+\+|clang|make|-dev$|build-", name)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_image_has_what_the_transfer_engine_links_to(variant):
    installed = set().union(*map(packages_of, FILE.lineage("plait", variant)))
    wanted = set(system._PACKAGES.values())
    assert wanted | {"libgomp1", "tini"} <= installed
    assert variant == "cpu" or set(system._CUDA_PACKAGES.values()) <= installed


def test_the_health_check_is_a_script_that_is_in_the_image():
    options, _, command = IMAGE.last("HEALTHCHECK").partition("CMD ")
    assert "--start-period=" in options
    script = command.strip("[]").split(", ")[-1].strip('"')
    copied = [text.split() for text in IMAGE.all("COPY")]
    folder = next(words[-1] for words in copied if words[0] == "scripts/healthcheck.py")
    assert script == f"{folder}healthcheck.py"


def test_labels():
    prefix = "org.opencontainers.image."
    labels = IMAGE.pairs("LABEL")
    wanted = ["title", "description", "licenses", "version", "revision", "created"]
    assert {prefix + name for name in wanted} <= set(labels)
    assert labels[f"{prefix}licenses"] == "Apache-2.0"
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version and IMAGE.pairs("ARG")["VERSION"] == version[1]


def test_nothing_secret_is_kept():
    """Certificates, credentials and the index's address come as secrets, for one step each."""
    names = set(FILE.arguments)
    for stage in FILE.stages.values():
        names |= set(stage.pairs("ARG")) | set(stage.pairs("ENV"))
    assert not {name for name in names if re.search(r"KEY|TOKEN|SECRET|PASSW|CERT|CRED", name)}
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert not re.search(r"trusted-host|://[^/\s]*@|\.crt\b", text)
    assert not [run for run in IMAGE.all("RUN") if "pip" in run or "http" in run]


def test_what_is_installed_is_pinned():
    script = (ROOT / "scripts/image_environment.sh").read_text(encoding="utf-8")
    installs = re.findall(r"^ +pip install (.*)$", script, re.M)
    assert len(installs) == 4
    for install in installs:
        assert "-c constraints.txt" in install or "--no-deps" in install, install
    assert "--no-build-isolation" in installs[-1] and "--no-build-isolation" in installs[-2]
    pinned = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned and FILE.stages["build"].pairs("ARG")["TORCH_SPEC"] == pinned[0]
    for variant in VARIANTS:
        tag = FILE.arguments[f"{variant.upper()}_BASE"].partition(":")[2]
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
