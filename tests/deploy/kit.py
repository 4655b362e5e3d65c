"""What lies in deploy/: its objects, its units, and every ``batchmill`` command in it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.kit.files import ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
COMPOSE = (DEPLOY / "compose.yaml", DEPLOY / "compose.split.yaml")
VARIANTS = (DEPLOY / "kubernetes" / "base", DEPLOY / "kubernetes" / "split")
UNITS = tuple(sorted((DEPLOY / "systemd").glob("*.service")))
SCRIPTS = (DEPLOY / "spark" / "entrypoint.sh",)
SPARK = "SparkApplication"

# At the start of a line, behind a path or another command: not where it is a namespace or a user.
_IN_TEXT = re.compile(
    r"(?:^|/bin/|-- |exec batchmill |&& |\")batchmill ([^`;|&#\n]+)", re.MULTILINE
)
_FENCED = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A ``batchmill`` command, and where it stands."""

    where: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.arguments)}"


def load(path: Path) -> Any:
    """A YAML file with one document."""
    return yaml.safe_load(path.read_text("utf-8"))


def name_of(path: Path) -> str:
    """A path as a test's name shows it."""
    return path.relative_to(ROOT).as_posix()


def services() -> Iterator[tuple[str, dict[str, Any]]]:
    """The services of the compose files."""
    for path in COMPOSE:
        for name, service in load(path)["services"].items():
            yield f"{name_of(path)}: {name}", service


def objects(variant: Path) -> list[tuple[str, dict[str, Any]]]:
    """The Kubernetes objects of a variant, as its kustomization lists them."""
    located = []
    for file in load(variant / "kustomization.yaml")["resources"]:
        for manifest in yaml.safe_load_all((variant / file).read_text("utf-8")):
            located.append((f"{name_of(variant / file)}: {manifest['kind']}", manifest))
    return located


def pods(variant: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pod templates of a variant, without Spark's."""
    for where, manifest in objects(variant):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield where, manifest["spec"]["template"]


def spark_application() -> dict[str, Any]:
    """The one there is."""
    every = [manifest for variant in VARIANTS for _, manifest in objects(variant)]
    (application,) = [manifest for manifest in every if manifest["kind"] == SPARK]
    return application


@cache
def unit(path: Path) -> dict[str, list[str]]:
    """The options of a systemd unit; each may be given several times."""
    options: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            options.setdefault(name, []).append(value)
    return options


def instructions(path: Path = DOCKERFILE) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, each with what follows it."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    cut = (line.strip().partition(" ") for line in whole.splitlines() if line.strip())
    return [(name.upper(), rest.strip()) for name, _, rest in cut]


def commands() -> list[Command]:
    """Every ``batchmill`` command in deploy/."""
    return [*_of_image(), *_of_compose(), *_of_kubernetes(), *_of_systemd(), *_of_texts()]


def _of_image() -> Iterator[Command]:
    for name, rest in instructions():
        if name == "CMD":
            yield Command("Dockerfile: CMD", tuple(json.loads(rest)))
        yield from _in_text(f"Dockerfile: {name}", rest)


def _of_compose() -> Iterator[Command]:
    for where, service in services():
        if str(service.get("image", "")).startswith("batchmill"):
            yield Command(where, tuple(service["command"]))


def _of_kubernetes() -> Iterator[Command]:
    for variant in VARIANTS:
        for where, pod in pods(variant):
            for container in pod["spec"]["containers"]:
                yield Command(f"{where} {container['name']}", tuple(container["args"]))
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    words = container.get(probe, {}).get("exec", {}).get("command", [])
                    yield from _in_text(f"{where} {probe}", "\n".join(words))
    arguments = spark_application()["spec"]["arguments"]
    yield Command(name_of(VARIANTS[1] / "pipeline.yaml"), tuple(arguments))


def _of_systemd() -> Iterator[Command]:
    for path in UNITS:
        for line in unit(path)["ExecStart"]:
            program, *arguments = shlex.split(line)
            assert program == "/opt/batchmill/bin/batchmill", line
            yield Command(path.name, tuple(arguments))


def _of_texts() -> Iterator[Command]:
    for block in _FENCED.findall((DEPLOY / "README.md").read_text("utf-8")):
        yield from _in_text("README.md", block)


def _in_text(where: str, text: str) -> Iterator[Command]:
    for command in _IN_TEXT.findall(text):
        yield Command(where, tuple(shlex.split(command.replace('"', " "))))
