"""``--sources``: event types of one's own, used from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchmill import cli, oal, sources
from batchmill.cli.options import SourcesError, import_sources
from batchmill.cli.pipeline import pipeline_arguments
from tests.kit.events import temporary_sources

EVENTS = """
from __future__ import annotations

from dataclasses import dataclass

from {kinds} import Kind

from batchmill.sources import service, source


@source(entity=service("shop"))
@dataclass(frozen=True)
class {name}:
    shop: str
    cents: int
    kind: Kind | None
"""
KINDS = "import enum\n\n\nclass Kind(enum.Enum):\n    CARD = 1\n"


@pytest.fixture(autouse=True)
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own; what a test imports and registers is gone after it."""
    modules, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    with temporary_sources():
        yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def batchmill(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command."""
    monkeypatch.setattr(sys, "argv", ["batchmill", *arguments])
    return cli.main()


def write_events(folder: Path, name: str) -> Path:
    """A module with one event type, which uses another module beside it."""
    folder.mkdir(exist_ok=True)
    kinds = f"kinds_of_{name.lower()}"
    (folder / f"{kinds}.py").write_text(KINDS)
    file = folder / "events.py"
    file.write_text(EVENTS.format(name=name, kinds=kinds))
    return file


def test_event_types_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given by its path, once or twice: the script may use what it defines."""
    file = write_events(tmp_path / "some where", "Sale")
    script = tmp_path / "shop.oal"
    script.write_text("sold = from(Sale.cents).filter(kind == Kind.CARD).sum();")
    assert batchmill(monkeypatch, "oal", "check", str(script)) == 1
    assert "Sale" in capsys.readouterr().err
    more = ["--sources", str(file), "--sources", str(file.relative_to(tmp_path))]
    assert batchmill(monkeypatch, "oal", "check", str(script), *more) == 0
    assert "sold" in capsys.readouterr().out


def test_event_types_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given by its dotted name, it is found from the current folder."""
    write_events(tmp_path / "webshop", "Order")
    (tmp_path / "webshop" / "kinds_of_order.py").rename(tmp_path / "kinds_of_order.py")
    script = tmp_path / "shop.oal"
    script.write_text("ordered = from(Order.cents).sum();")
    arguments = ("oal", "check", "--sources", "webshop.events", str(script))
    assert batchmill(monkeypatch, *arguments) == 0
    assert "ordered" in capsys.readouterr().out


def test_several_files_of_one_name(tmp_path: Path) -> None:
    """Each is a module of its own; none hides a module of Python's."""
    files = [write_events(tmp_path / name, name) for name in ("Sold", "Bought")]
    (tmp_path / "Sold" / "random.py").write_text("raise AssertionError")
    import_sources(map(str, files))
    assert {"Sold", "Bought"} <= set(sources.catalog().sources)
    assert "random" not in {Path(folder).name for folder in sys.path}
    assert Path(sys.path[0]) not in (tmp_path, *(file.parent for file in files))


@pytest.mark.parametrize("command", [["pipeline"], ["backfill", "old"]], ids=["stream", "backfill"])
def test_a_pipeline_takes_them_too(tmp_path: Path, command: list[str]) -> None:
    """They are imported before the pipeline loads its script."""
    pytest.importorskip("pyspark", reason="install it with: pip install 'batchmill[spark]'")
    file = write_events(tmp_path, "Refund")
    script = tmp_path / "shop.oal"
    script.write_text("refunded = from(Refund.cents).sum();")
    parsed = cli._parser().parse_args([*command, "--oal", str(script), "--sources", str(file)])
    assert oal.load(pipeline_arguments(parsed)["oal"])["refunded"].source == "Refund"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"),
        ("import nowhere_at_all", r"ModuleNotFoundError.*nowhere_at_all.*events\.py:1"),
        ("\n\n1 / 0", r"ZeroDivisionError.*events\.py:3"),
        ("def (", r"SyntaxError.*events\.py, line 1"),
        (
            EVENTS.format(name="Span", kinds="enum").replace("Kind", "Enum"),
            r"ConfigError: .*Span.*events\.py",
        ),
    ],
    ids=["missing", "import", "raises", "syntax", "refused"],
)
def test_a_file_that_cannot_be_imported_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    said: str,
) -> None:
    """Which one, why, where in it, and what may be given; as often as it is tried."""
    file = tmp_path / "events.py"
    if content is not None:
        file.write_text(content)
    for _ in range(2):
        with pytest.raises(SourcesError, match=said) as caught:
            import_sources([str(file)])
        assert "dotted name of a module" in str(caught.value)
    assert batchmill(monkeypatch, "oal", "check", "x.oal", "--sources", str(file)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"batchmill oal check: --sources {file} cannot be imported: ")


@pytest.mark.parametrize("name", ["no_such_module_here", ".events", "", "events.txt/"])
def test_a_module_that_cannot_be_found_is_reported(name: str) -> None:
    """By its name, with where modules are looked for."""
    with pytest.raises(SourcesError, match="in the current folder"):
        import_sources([name])


def test_a_pipeline_tells_it_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and the message, with no session of Spark having been made."""
    pytest.importorskip("pyspark", reason="install it with: pip install 'batchmill[spark]'")
    assert batchmill(monkeypatch, "pipeline", "--sources", "no_such_module_here") == 1
    assert "--sources no_such_module_here cannot be imported" in capsys.readouterr().err
