"""Salts and their numbers."""

from __future__ import annotations

from pagedjax.engine.namespaces import Namespaces


def test_a_salt_keeps_its_number_and_a_forgotten_one_gets_a_new_one():
    namespaces = Namespaces(max_salts=2)
    a, b = namespaces.of("a"), namespaces.of("b")
    assert a != b
    assert namespaces.of("a") == a
    c = namespaces.of("c")  # "b" is forgotten
    assert namespaces.of("a") == a
    assert len({a, b, c, namespaces.of("b")}) == 4
