"""Errors cross between Spark's processes and keep what they know."""

from __future__ import annotations

import inspect
import pickle

import pytest

from ledgerlake import errors

CLASSES = [
    error_class
    for _, error_class in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error_class, errors.LedgerlakeError) and error_class is not errors.LedgerlakeError
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_with_its_attributes(kind: type[errors.LedgerlakeError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what, where, what to do", code="ServiceNotReady", reason="r")))
    assert type(error) is kind
    assert (str(error), error.attributes["code"], vars(error)["reason"]) == (
        "what, where, what to do",
        "ServiceNotReady",
        "r",
    )
    assert error.exit_code in (1, 2, 3)
    assert error.lost in ("no", "unknown", "yes")


def test_the_tree_in_the_docstring_names_every_class() -> None:
    assert errors.__doc__ is not None
    assert [class_.__name__ for class_ in CLASSES if class_.__name__ not in errors.__doc__] == []


def test_retrying_is_decided_by_the_error_alone() -> None:
    assert errors.is_retryable(errors.DeadlineError("x"))
    assert errors.is_retryable(errors.BrokerError("x", code="ServiceNotReady"))
    assert not errors.is_retryable(errors.BrokerError("x", code="AuthorizationError"))
    assert not errors.is_retryable(errors.UsageError("x"))
    assert not errors.is_retryable(ValueError("x"))
