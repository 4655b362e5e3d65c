"""A metric: what it measures, where, and how its value comes out of merged states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batchmill.oal.functions import FUNCTIONS, Arg, Value
from batchmill.oal.model import Condition, Path, Position, all_of, quote
from batchmill.oal.states import State

NOWHERE = Position("<made>", 0, 0)
"""The position of a metric that no script defines."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Equal to another when name and definition are; where it stands does not count."""

    name: str
    source: str
    """The event type that it is taken from."""
    value: Path | None
    """What is measured; None stands for ``*``, the row as such."""
    filters: tuple[Condition, ...] = field(compare=False)
    """The conditions on a row, as they were written; all must hold."""
    function: str
    args: tuple[Arg, ...] = ()
    decorator: str | None = None
    where: Position = field(default=NOWHERE, compare=False)
    """Where it is defined."""
    text: str = field(init=False)
    """The definition in its one canonical form: the same text, the same metric. Without the name,
    and without whitespace but what words need between them."""
    states: tuple[State, ...] = field(init=False, compare=False)
    """What its rows are reduced to, in the order that :meth:`values` takes them."""
    labelled: bool = field(init=False, compare=False)
    """Whether its value is a dict with one number for each label."""

    def __post_init__(self) -> None:
        function = FUNCTIONS[self.function]
        where = all_of(self.filters)
        object.__setattr__(self, "text", self._text())
        object.__setattr__(self, "states", function.states(where, self.value, self.args))
        object.__setattr__(self, "labelled", function.labelled)

    def values(self, states: Sequence[Any], minutes: int) -> Value:
        """The final value, from the merged states of one entity and bucket.

        ``minutes`` is how long the bucket is: 1, 60 or 1440. None: no row matched.
        """
        return FUNCTIONS[self.function].finish(self.args, states, minutes)

    @property
    def definition(self) -> str:
        """The whole statement, as a script would have it."""
        return f"{self.name} = {self.text};"

    def _text(self) -> str:
        measured = f"{self.source}.*"
        if self.value is not None:
            # A cast stands in front of the source: (str->long)Service.tag["k"].
            plain = Path(self.value.parts, self.value.type).text
            cast = f"(str->{self.value.cast})" if self.value.cast else ""
            measured = f"{cast}{self.source}.{plain}"
        filters = "".join(f".filter({each.text})" for each in all_of(self.filters))
        args = ",".join(str(each) for each in self.args)
        decorator = f".decorator({quote(self.decorator)})" if self.decorator is not None else ""
        return f"from({measured}){filters}.{self.function}({args}){decorator}"
