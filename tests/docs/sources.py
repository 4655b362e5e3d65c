"""The tables of event types in docs/sources.md: `python -m tests.docs.sources` writes them anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from batchmill.sources import Catalog, Entity, Field, FieldType, builtin_catalog
from tests.docs.kit import DOCS

PAGE = DOCS / "sources.md"
BEGIN = "<!-- The tables from here on are made by `python -m tests.docs.sources`. -->\n"


def made() -> str:
    """The tables, from the catalog itself."""
    return "\n".join(_lines(builtin_catalog())) + "\n"


def _lines(catalog: Catalog) -> Iterator[str]:
    yield from ("", "## All event types", "")
    yield "| event type | entity, and the fields that name it | fields |"
    yield "|---|---|---|"
    for source in catalog.sources.values():
        yield f"| `{source.name}` | {_entity(source.entity)} | {_fields(source.fields.values())} |"
    yield from ("", "## Groups of fields", "", "Reached with dots: `write.l4.duration`.", "")
    yield from ("| group | fields |", "|---|---|")
    for name, kind in sorted(_structs(catalog).items()):
        yield f"| `{name}` | {_fields(kind.fields)} |"
    yield from ("", "## Enums", "", "Written with their name: `DetectPoint.SERVER`.", "")
    yield from ("| enum | values |", "|---|---|")
    for name, values in sorted(catalog.enums.items()):
        yield f"| `{name}` | {', '.join(f'`{value}`' for value in values)} |"


def _entity(entity: Entity) -> str:
    kind = entity.kind.replace("_", " ")
    if kind == "given":
        return f"as given in `{entity.roles['field']}`"
    roles = (f"{role.replace('_', ' ')} {_role(text)}" for role, text in entity.roles.items())
    return f"{kind}: {', '.join(roles)}"


def _role(text: str) -> str:
    return text.removeprefix("=") if text.startswith("=") else f"`{text}`"


def _fields(fields: Iterable[Field]) -> str:
    return ", ".join(
        f"`{field.name}` {_type(field.type)}{' (required)' if field.required else ''}"
        for field in fields
    )


def _type(kind: FieldType) -> str:
    if kind.kind in ("enum", "struct"):
        return kind.name
    if kind.kind == "list" and kind.item is not None:
        return f"list of {kind.item.kind}"
    return kind.kind


def _structs(catalog: Catalog) -> dict[str, FieldType]:
    structs: dict[str, FieldType] = {}
    waiting = [
        field.type for source in catalog.sources.values() for field in source.fields.values()
    ]
    while waiting:
        kind = waiting.pop()
        if kind.kind == "struct" and kind.name not in structs:
            structs[kind.name] = kind
            waiting += [field.type for field in kind.fields]
    return structs


def main() -> None:
    """Write the tables."""
    kept, _, _ = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(kept + BEGIN + made(), "utf-8")


if __name__ == "__main__":
    main()
