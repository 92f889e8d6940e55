"""Symbols: values that a plan leaves open and a pass binds, such as the KV write offset."""

from __future__ import annotations

from dataclasses import dataclass

from vkdecode.errors import InvalidInputError, SymbolConflict


@dataclass(frozen=True)
class SymId:
    """A symbol of a graph; the name is for people."""

    index: int
    name: str

    def __str__(self) -> str:
        return self.name


class SymEnv:
    """The values of symbols in one pass. Write-once: binding a symbol again is allowed only to the same value."""

    def __init__(self) -> None:
        self._values: dict[SymId, int] = {}

    def bind(self, symbol: SymId, value: int) -> None:
        """Bind a symbol to an unsigned 32-bit value.

        Raises:
            SymbolConflict: it is bound to another value in this pass.
            InvalidInputError: the value is out of range.

        """
        if not 0 <= value < 1 << 32:
            raise InvalidInputError(f"symbol {symbol} needs an unsigned 32-bit value, not {value}")
        held = self._values.setdefault(symbol, value)
        if held != value:
            raise SymbolConflict(
                f"symbol {symbol} is bound to {held} in this pass and cannot become {value}; use a new SymEnv"
            )

    def resolve(self, value: int | SymId) -> int:
        """The number itself, or what the symbol is bound to.

        Raises:
            InvalidInputError: the symbol is not bound.

        """
        if not isinstance(value, SymId):
            return value
        if value not in self._values:
            raise InvalidInputError(f"symbol {value} is not bound in this pass")
        return self._values[value]

    def __contains__(self, symbol: SymId) -> bool:
        return symbol in self._values
