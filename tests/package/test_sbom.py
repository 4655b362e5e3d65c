"""The software bill of materials: what the lock file has, with hashes and licences."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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
