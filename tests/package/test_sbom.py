"""Dependencies: the bill of materials, their licences, and the search for vulnerabilities."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyspark
import pytest
from packaging.requirements import Requirement

import batchmill
from tests.kit.files import ROOT

LOCKS = [ROOT / "requirements" / f"{name}.lock" for name in ("run", "jre")]
LOCK = "".join(lock.read_text() for lock in LOCKS)
UPLOT = ROOT / "src" / "batchmill" / "web" / "static" / "vendor" / "uplot"


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document."""
    out = tmp_path_factory.mktemp("sbom") / "sbom.json"
    script = ROOT / "scripts" / "sbom.py"
    subprocess.run([sys.executable, str(script), *map(str, LOCKS), str(out)], check=True)
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def test_the_bill_says_what_it_is_of(bill: dict[str, Any]) -> None:
    """The product by name, version and licence; each component has a reference of its own."""
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    version = batchmill.__version__
    assert bill["metadata"]["component"] == {
        "type": "application",
        "name": "batchmill",
        "version": version,
        "purl": f"pkg:pypi/batchmill@{version}",
        "bom-ref": f"batchmill@{version}",
        "licenses": [{"expression": "Apache-2.0"}],
    }
    references = [part["bom-ref"] for part in [bill["metadata"]["component"], *bill["components"]]]
    assert len(references) == len(set(references))


def test_what_the_wheel_contains_of_others_is_in_the_bill(bill: dict[str, Any]) -> None:
    """Every script and style sheet of ``vendor``, in the version that it states itself."""
    [uplot] = [part for part in bill["components"] if part["purl"].startswith("pkg:npm/")]
    [version] = re.findall(
        r"uPlot \(v([0-9.]+)\)", (UPLOT / "uPlot.iife.min.js").read_text("utf-8")
    )
    assert (uplot["name"], uplot["version"]) == ("uplot", version)
    assert uplot["purl"] == f"pkg:npm/uplot@{version}"
    assert uplot["licenses"] == [{"expression": "MIT"}]
    hashes = {
        part["name"]: [(entry["alg"], entry["content"]) for entry in part["hashes"]]
        for part in uplot["components"]
    }
    files = [file for file in UPLOT.parent.rglob("*") if file.suffix in {".js", ".css"}]
    assert hashes == {
        file.relative_to(ROOT / "src").as_posix(): [
            ("SHA-256", hashlib.sha256(file.read_bytes()).hexdigest())
        ]
        for file in files
    }
    assert f"uPlot) {version}" in (ROOT / "docs" / "web.md").read_text("utf-8")


def test_every_locked_package_is_in_the_bill(bill: dict[str, Any]) -> None:
    """With a package URL, its hashes, and a licence if it is installed."""
    pinned = re.findall(r"^([A-Za-z0-9._-]+)(?:\[.*\])?==([^\s;\\]+)", LOCK, re.MULTILINE)
    components = {component["purl"]: component for component in bill["components"]}
    listed = {url: part for url, part in components.items() if url.startswith("pkg:pypi/")}
    assert listed.keys() == {f"pkg:pypi/{name.lower()}@{version}" for name, version in pinned}
    assert sum(len(part["hashes"]) for part in listed.values()) == LOCK.count("--hash=sha256:")
    [pyarrow] = [part for part in listed.values() if part["name"] == "pyarrow"]
    assert "Apache" in json.dumps(pyarrow["licenses"])


def test_every_package_that_an_extra_installs_is_in_the_bill(bill: dict[str, Any]) -> None:
    """In a version that the extra allows; but for ``iceberg``, which takes an older PySpark than
    ``spark``, so that both cannot be locked together.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra, lines in project["optional-dependencies"].items():
        for requirement in map(Requirement, lines):
            if requirement.name == project["name"]:
                continue  # `all` has the names of other extras
            versions = [
                part["version"] for part in bill["components"] if part["name"] == requirement.name
            ]
            assert versions, f"{requirement.name} of the extra {extra}"
            allowed = all(map(requirement.specifier.contains, versions))
            assert allowed is (extra != "iceberg"), requirement


def test_the_jars_of_spark_are_in_the_bill(bill: dict[str, Any]) -> None:
    """As parts of pyspark, each with its hash; a vulnerability of one is found by its name."""
    [pyspark_part] = [part for part in bill["components"] if part["name"] == "pyspark"]
    jars = pyspark_part["components"]
    files = [*(Path(pyspark.__file__).parent / "jars").rglob("*.jar")]
    assert {f"{jar['name']}-{jar['version']}.jar" for jar in jars} == {file.name for file in files}
    [log4j] = [jar for jar in jars if jar["name"] == "log4j-core"]
    [file] = [file for file in files if file.name.startswith("log4j-core-")]
    assert log4j == {
        "type": "library",
        "name": "log4j-core",
        "version": log4j["version"],
        "purl": f"pkg:maven/org.apache.logging.log4j/log4j-core@{log4j['version']}",
        "hashes": [
            {"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()},
        ],
    }
    urls = {jar["purl"] for jar in jars if "purl" in jar}
    assert any(
        re.fullmatch(r"pkg:maven/org\.jline/jline@[\d.]+\?classifier=jdk8", url) for url in urls
    )
    assert all("@" in url and not url.endswith("@") for url in urls)


def test_the_page_of_licences_has_every_locked_package(tmp_path: Path) -> None:
    """Each with a licence; the page is made again when the lock file changes."""
    page = ROOT / "docs" / "licences.md"
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", page.read_text("utf-8"), re.MULTILINE)
    listed = {f"{name}=={version}": licence for name, version, licence in rows[1:]}
    pinned = re.findall(r"^([A-Za-z0-9._-]+)(?:\[.*\])?==([^\s;\\]+)", LOCK, re.MULTILINE)
    [about] = re.findall(r"^uPlot (\S+),", (UPLOT / "VERSION").read_text("utf-8"))
    expected = {f"{name.lower()}=={version}" for name, version in [*pinned, ("uplot", about)]}
    [command] = re.findall(r"<!-- Made by `(.*)`", page.read_text("utf-8"))
    assert listed.keys() == expected, command
    assert all(licence.strip() for licence in listed.values())


AUDIT = runpy.run_path(str(ROOT / "scripts" / "audit.py"))
LOCKED = "good==1.0 \\\n    --hash=sha256:0\nBad_Name[x]==2.0 ; python_version < '4'\n"
KNOWN = {"vulnerabilities": [{"id": "CVE-1", "fixed_in": ["2.1"]}]}
NONE: dict[str, Any] = {"vulnerabilities": []}


def audit(pages: dict[str, Any]) -> tuple[bool, list[str]]:
    """The audit of two packages by a service that has these pages."""
    result: tuple[bool, list[str]] = AUDIT["audit"]([LOCKED, LOCKED], pages.get)
    return result


CANARY = {"pycrypto/2.6.1/json": KNOWN}


def test_a_vulnerability_of_a_locked_version_fails_the_audit() -> None:
    """The line has the version, and where it is fixed."""
    fine, lines = audit({**CANARY, "good/1.0/json": NONE, "bad-name/2.0/json": KNOWN})
    assert not fine
    assert lines == [
        "bad-name 2.0: CVE-1, fixed in 2.1",
        "2 of 2 locked versions audited, 1 with vulnerabilities",
    ]


def test_a_package_without_an_answer_is_named() -> None:
    """The page of a package counts if it is about the locked version."""
    about = {"info": {"version": "1.0"}, **NONE}
    fine, lines = audit({**CANARY, "good/json": about, "bad-name/json": about})
    assert fine
    assert lines == [
        "no answer for 1 of 2: bad-name 2.0",
        "1 of 2 locked versions audited, 0 with vulnerabilities",
    ]


def test_a_service_that_knows_no_vulnerability_at_all_is_no_audit() -> None:
    """Nobody may read silence as a clean bill."""
    for pages in ({}, {"pycrypto/2.6.1/json": NONE}):
        fine, [line] = audit(pages)
        assert fine
        assert line.startswith("nothing was audited: ")


def test_a_vulnerability_that_was_withdrawn_does_not_count() -> None:
    """It was reported by mistake."""
    gone = {"vulnerabilities": [{"id": "CVE-2", "withdrawn": "2026-01-01T00:00:00Z"}]}
    fine, _ = audit({**CANARY, "good/1.0/json": gone, "bad-name/2.0/json": NONE})
    assert fine
