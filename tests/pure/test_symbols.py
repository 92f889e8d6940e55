"""SymEnv: write-once within a pass, and nothing is made up for what is not bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkdecode.errors import InvalidInputError, SymbolConflict, VkDecodeError
from vkdecode.graph import Graph, SymEnv

values = st.integers(0, 2**32 - 1)


def test_symbols_of_one_name_are_different_symbols() -> None:
    graph = Graph()
    first, second = graph.symbol("cached_len"), graph.symbol("cached_len")
    env = SymEnv()
    env.bind(first, 3)
    assert first != second
    assert first in env and second not in env
    assert str(first) == "cached_len"


@given(values, values)
def test_a_symbol_takes_one_value(held: int, other: int) -> None:
    symbol = Graph().symbol("cached_len")
    env = SymEnv()
    env.bind(symbol, held)
    env.bind(symbol, held)
    if other != held:
        with pytest.raises(SymbolConflict, match=f"cached_len is bound to {held} .* cannot become {other}"):
            env.bind(symbol, other)
    assert env.resolve(symbol) == held


def test_another_pass_may_bind_another_value() -> None:
    symbol = Graph().symbol("cached_len")
    first, second = SymEnv(), SymEnv()
    first.bind(symbol, 1)
    second.bind(symbol, 2)
    assert (first.resolve(symbol), second.resolve(symbol)) == (1, 2)


def test_an_unbound_symbol_has_no_value() -> None:
    with pytest.raises(InvalidInputError, match="attended_len is not bound"):
        SymEnv().resolve(Graph().symbol("attended_len"))


def test_a_number_stands_for_itself() -> None:
    assert SymEnv().resolve(17) == 17


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_value_that_a_push_constant_cannot_hold_is_refused(value: int) -> None:
    symbol = Graph().symbol("cached_len")
    env = SymEnv()
    with pytest.raises(InvalidInputError, match="unsigned 32-bit"):
        env.bind(symbol, value)
    assert symbol not in env
    env.bind(symbol, 5)


def test_a_conflict_is_an_error_of_this_package() -> None:
    assert issubclass(SymbolConflict, VkDecodeError)
