"""Looks up known vulnerabilities of all packages in lock files.

``python scripts/audit.py requirements/*.lock`` asks PyPI's JSON API, the service that pip-audit
asks by default. Exit code 1: a locked version has a known vulnerability. Packages for which there
is no answer are listed; without any answer nothing was audited, which it says, and does not fail.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SERVICE = "https://pypi.org/pypi"
VULNERABLE = ("pycrypto", "2.6.1")
"""Abandoned, with known vulnerabilities: a service that does not know them knows none."""
_TIMEOUT_S = 30
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?==(?P<version>[^\s;\\]+)", re.MULTILINE)
Pin = tuple[str, str]


def pins(locks: Iterable[str]) -> list[Pin]:
    """The packages of lock files, each version once."""
    packages = {
        (re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])
        for lock in locks
        for match in _PIN.finditer(lock)
    }
    return sorted(packages)


def vulnerabilities(pin: Pin, fetch: Callable[[str], Any]) -> list[str] | None:
    """The known vulnerabilities of a version, with where they are fixed; None: no answer.

    A mirror may only have the page of a package, which is about its newest version.
    """
    name, version = pin
    page = fetch(f"{name}/{version}/json")
    if page is None:
        page = fetch(f"{name}/json")
        if page is None or page.get("info", {}).get("version") != version:
            return None
    if "vulnerabilities" not in page:
        return None
    return [
        f"{entry['id']}, fixed in {', '.join(entry.get('fixed_in') or ()) or 'no version'}"
        for entry in page["vulnerabilities"]
        if not entry.get("withdrawn")
    ]


def audit(locks: Iterable[str], fetch: Callable[[str], Any]) -> tuple[bool, list[str]]:
    """Whether no vulnerability is known, and lines for the reader."""
    if not vulnerabilities(VULNERABLE, fetch):
        return True, [
            f"nothing was audited: {SERVICE} does not answer, or not with vulnerabilities. "
            "Run it where it can be reached"
        ]
    wanted = pins(locks)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda pin: vulnerabilities(pin, fetch), wanted))
    lines, bad = [], 0
    for (name, version), answer in zip(wanted, answers, strict=True):
        if answer:
            bad += 1
            lines += [f"{name} {version}: {text}" for text in answer]
    silent = [
        f"{name} {version}"
        for (name, version), answer in zip(wanted, answers, strict=True)
        if answer is None
    ]
    if silent:
        lines.append(f"no answer for {len(silent)} of {len(wanted)}: {', '.join(silent)}")
    known = len(wanted) - len(silent)
    lines.append(f"{known} of {len(wanted)} locked versions audited, {bad} with vulnerabilities")
    return not bad, lines


def from_service(path: str) -> Any:
    """A page of the service; None: it has none, or cannot be reached."""
    try:
        with urllib.request.urlopen(f"{SERVICE}/{path}", timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    fine, text = audit((Path(name).read_text("utf-8") for name in sys.argv[1:]), from_service)
    sys.stdout.write("\n".join(text) + "\n")
    raise SystemExit(0 if fine else 1)
