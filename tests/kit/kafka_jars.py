"""The jars of the tests with a Kafka broker: resolved once with Maven, kept outside the repository.

``python -m tests.kit.kafka_jars`` resolves them, or says why it cannot; see the Makefile. With
``--there`` it only looks.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

POM = Path(__file__).resolve().with_name("kafka-pom.xml")
PROFILES = ("broker", "spark")
RESOLVE_S = 900
_HINT = "scripts/system-packages.sh maven says how to get it"


def folder(profile: str) -> Path:
    """Where the jars of a profile are, or will be: another folder for every version of the pom."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = hashlib.sha256(POM.read_bytes()).hexdigest()[:16]
    return cache / "batchmill" / "jars" / version / profile


def jars(profile: str) -> list[Path]:
    """The jars of a profile; only after :func:`jars_missing` said that they are there."""
    return sorted(folder(profile).glob("*.jar"))


def spark_jars() -> str:
    """What Spark needs for Kafka, as ``spark.jars`` takes it; empty if it was not resolved yet."""
    return ",".join(str(each) for each in jars("spark"))


@functools.cache
def jars_missing(profile: str) -> str | None:
    """Why there are no jars, after an attempt to get them: a reason to skip. None: there are."""
    try:
        resolve(profile)
    except RuntimeError as error:
        return str(error)
    return None


def resolve(profile: str) -> Path:
    """Have the jars in their folder; raises RuntimeError with what to do if that is impossible."""
    place = folder(profile)
    if place.is_dir():
        return place
    maven = shutil.which("mvn")
    if maven is None:
        raise RuntimeError(
            f"the jars for the tests with Kafka ({profile}) are not in {place}, "
            f"and Maven is not here to get them: {_HINT}"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=place.parent, prefix=".fresh-"))
    try:
        _copy(maven, profile, fresh)
        try:
            fresh.rename(place)
        except OSError:  # somebody else was quicker: theirs are the same
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return place


def _copy(maven: str, profile: str, into: Path) -> None:
    command = [
        *(maven, "--quiet", "--batch-mode", "--file", str(POM), f"--activate-profiles={profile}"),
        *("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={into}"),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RESOLVE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"Maven Central did not give Kafka's jars ({profile}) within {RESOLVE_S} s: "
            "try again later"
        ) from None
    if done.returncode or not any(into.glob("*.jar")):
        said = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(
            f"Kafka's jars ({profile}) could not be had from Maven Central: can this machine "
            f"reach it? Maven said: {' '.join(said[:3])[:600] or 'nothing'}"
        )


def main(arguments: list[str]) -> int:
    """The command."""
    if arguments == ["--there"]:
        return 0 if all(folder(each).is_dir() for each in PROFILES) else 1
    missing = [why for each in PROFILES if (why := jars_missing(each)) is not None]
    sys.stderr.writelines(f"{why}\n" for why in missing)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
