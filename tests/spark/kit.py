"""What the tests of the pipeline share."""

from __future__ import annotations

from pathlib import Path


def forget_commit(checkpoint: Path) -> None:
    """Take the mark off the newest batch that Spark has finished: it will be run again."""
    commits = checkpoint / "spark" / "commits"
    newest = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    (commits / str(newest)).unlink()
    (commits / f".{newest}.crc").unlink(missing_ok=True)
