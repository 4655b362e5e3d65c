"""Dependencies: the bill of materials, their licences, and the search for vulnerabilities."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kit.files import ROOT

LOCK = ROOT / "requirements" / "run.lock"


def test_every_locked_package_is_in_the_bill(tmp_path: Path) -> None:
    """With a package URL, its hashes, and a licence if it is installed."""
    out = tmp_path / "sbom.json"
    script = ROOT / "scripts" / "sbom.py"
    subprocess.run([sys.executable, str(script), str(LOCK), str(out)], check=True)
    bill = json.loads(out.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    text = LOCK.read_text()
    pinned = re.findall(r"^([A-Za-z0-9._-]+)(?:\[.*\])?==([^\s;\\]+)", text, re.MULTILINE)
    listed = {component["purl"]: component for component in bill["components"]}
    assert listed.keys() == {f"pkg:pypi/{name.lower()}@{version}" for name, version in pinned}
    assert sum(len(part["hashes"]) for part in listed.values()) == text.count("--hash=sha256:")
    [pyarrow] = [part for part in listed.values() if part["name"] == "pyarrow"]
    assert "Apache" in json.dumps(pyarrow["licenses"])


def test_the_page_of_licences_has_every_locked_package(tmp_path: Path) -> None:
    """Each with a licence; the page is made again when the lock file changes."""
    page = ROOT / "docs" / "licences.md"
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", page.read_text("utf-8"), re.MULTILINE)
    listed = {f"{name}=={version}": licence for name, version, licence in rows[1:]}
    pinned = re.findall(
        r"^([A-Za-z0-9._-]+)(?:\[.*\])?==([^\s;\\]+)", LOCK.read_text(), re.MULTILINE
    )
    assert listed.keys() == {f"{name.lower()}=={version}" for name, version in pinned}, (
        "python scripts/sbom.py requirements/run.lock docs/licences.md"
    )
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
