"""A Dockerfile as values: stages, their instructions, what a stage inherits."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)  # (RUN, what follows)

    def all(self, verb: str) -> list[str]:
        return [text for found, text in self.instructions if found == verb]

    def last(self, verb: str) -> str:
        return self.all(verb)[-1]

    def exec_form(self, verb: str) -> list[str]:
        words: list[str] = json.loads(self.last(verb))
        return words

    def pairs(self, verb: str) -> dict[str, str]:
        """ENV and LABEL as a mapping; ARG's defaults, "" where there is none."""
        found: dict[str, str] = {}
        for text in self.all(verb):
            for name, quoted, plain in re.findall(r'([\w.]+)(?:=(?:"([^"]*)"|(\S*)))?', text):
                found[name] = quoted or plain
        return found


@dataclass(frozen=True, slots=True)
class Dockerfile:
    arguments: dict[str, str]  # before the first FROM
    stages: dict[str, Stage]

    def lineage(self, name: str, variant: str) -> list[Stage]:
        """The stage and those that its file system comes from, COPY --from left out."""
        stages = [self.stages[name]]
        while (base := stages[-1].base.replace("${VARIANT}", variant)) in self.stages:
            stages.append(self.stages[base])
        return stages


def read() -> Dockerfile:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, map(str.strip, joined.splitlines())):
        verb, _, rest = line.partition(" ")
        if verb == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Stage(name, base)
        elif stage is None:
            name, _, default = rest.partition("=")
            arguments[name] = default
        else:
            stage.instructions.append((verb, rest.strip()))
    return Dockerfile(arguments, stages)
