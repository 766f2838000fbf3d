"""Problem documents: bounded whatever they quote."""

from __future__ import annotations

from loka_serve.server.problems import LONGEST_FIELD, LONGEST_TEXT, invalid, shorten


def test_texts_of_usual_length_stay() -> None:
    problem = invalid("history[1]", "expected `str`, got `int`").problem("id")
    assert problem.detail == "history[1]: expected `str`, got `int`"
    assert [(error.field, error.message) for error in problem.errors] == [("history[1]", "expected `str`, got `int`")]
    assert shorten("a" * 100, 100) == "a" * 100


def test_the_middle_of_a_long_text_is_left_out() -> None:
    problem = invalid("f" * 1000, "line 1: " + "x" * 2_000_000 + ": expected less").problem("id")
    (error,) = problem.errors
    assert len(error.field) <= LONGEST_FIELD
    assert len(error.message) <= LONGEST_TEXT and len(problem.detail) <= LONGEST_TEXT
    assert error.message.startswith("line 1: xxx") and error.message.endswith("x: expected less")
    assert " characters left out] " in error.message
