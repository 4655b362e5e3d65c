"""Writes the software bill of materials of a release, in CycloneDX's JSON.

``python scripts/sbom.py requirements/run.lock FILE``: the components are those of the lock file,
with the hashes of their files; licences are what the installed packages say of themselves. With a
FILE that ends with ``.md`` it writes the page of the licences instead: ``docs/licences.md``.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?==(?P<version>[^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def components(lock: str) -> list[dict[str, Any]]:
    """The packages of a lock file."""
    found: list[dict[str, Any]] = []
    for line in lock.splitlines():
        if pin := _PIN.match(line):
            name, version = pin["name"].lower().replace("_", "-"), pin["version"]
            found.append(
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
            found[-1]["hashes"].append({"alg": "SHA-256", "content": digest})
    return found


def licences(name: str) -> list[dict[str, Any]]:
    """What an installed package says of its licence; empty if it is not installed."""
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
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "batchmill"}},
        "components": components(lock),
    }


def licence_page(lock: str) -> str:
    """The licences of all packages, as a page of the documentation."""
    lines = [
        "# Licences of dependencies",
        "",
        "What `pip install 'batchmill[…]'` with all extras installs, with the licences that the",
        "packages state. batchmill itself is under the Apache License 2.0; its in-process library",
        "needs none of these packages. PySpark's package contains the jars of Spark; their",
        "licences are in its folder `pyspark/licenses`. `make dist` writes the same list, with the",
        "hashes of all files, as a software bill of materials (CycloneDX): `dist/sbom.cdx.json`.",
        "",
        "<!-- Made by `python scripts/sbom.py requirements/run.lock docs/licences.md`. -->",
        "",
        "| package | version | licence |",
        "|---|---|---|",
    ]
    for part in components(lock):
        names = [entry.get("expression") or entry["license"]["name"] for entry in part["licenses"]]
        lines.append(f"| {part['name']} | {part['version']} | {', '.join(names)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    locked, target = Path(sys.argv[1]).read_text("utf-8"), Path(sys.argv[2])
    page = target.suffix == ".md"
    content = licence_page(locked) if page else json.dumps(bill(locked), indent=1)
    target.write_text(content + "\n", "utf-8")
