"""Errors cross between Spark's processes and keep what they know."""

from __future__ import annotations

import inspect
import pickle

import pytest

from ledgerlake import errors
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.failures import own_error

CLASSES = [
    error_class
    for _, error_class in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error_class, errors.LedgerlakeError) and error_class is not errors.LedgerlakeError
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_with_its_attributes(kind: type[errors.LedgerlakeError]) -> None:
    error = pickle.loads(
        pickle.dumps(kind("what, where, what to do", code="ServiceNotReady", reason="r"))
    )
    assert type(error) is kind
    assert (str(error), error.attributes["code"], vars(error)["reason"]) == (
        "what, where, what to do",
        "ServiceNotReady",
        "r",
    )
    assert error.exit_code in (1, 2, 3)
    assert error.lost in ("no", "unknown", "yes")


def test_a_name_of_any_length_makes_no_message_of_any_length() -> None:
    error = pickle.loads(
        pickle.dumps(errors.SetupError(f"a field {'x' * 1_000_000} is odd; rename it"))
    )
    assert len(error.message) < 4000
    assert error.message.startswith("a field xxx")
    assert error.message.endswith("xxx is odd; rename it")
    assert str(error) == error.message


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x85", "\u2028"])
def test_a_name_from_outside_cannot_look_like_another_error(end: str) -> None:
    error = errors.DecryptionError(
        f"the entry is encrypted for x{end}ledgerlake.errors.DataLossError: it is gone"
    )
    assert len(str(error).splitlines()) == 1
    found = own_error(RuntimeError(f"  File 'x'\nledgerlake.errors.DecryptionError: {error}\n"))
    assert type(found) is errors.DecryptionError
    assert str(found) == str(error)


def test_a_name_with_half_of_a_surrogate_pair_makes_a_message_that_a_table_takes() -> None:
    error = pickle.loads(
        pickle.dumps(errors.SetupError("a type \ud800 and \udfff, not \U0001f600"))
    )
    assert error.message == r"a type \ud800 and \udfff, not " + "\U0001f600"
    assert error.message.encode().decode() == str(error)


def test_the_tree_in_the_docstring_names_every_class() -> None:
    assert errors.__doc__ is not None
    assert [class_.__name__ for class_ in CLASSES if class_.__name__ not in errors.__doc__] == []


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.TopicNotFoundError("x"), 2),
        (errors.BrokerError("x", code="AuthorizationError"), 2),
        (errors.TableError("x"), 2),
        (errors.BrokerError("x", code="ServiceNotReady"), 3),
        # The broker learns late that the process of a host that vanished is gone.
        (errors.ConsumerBusyError("x"), 3),
        (errors.TableAccessError("x"), 3),
        (errors.TransportError("x"), 3),
    ],
)
def test_a_command_ends_with_3_if_running_it_again_may_help(
    error: errors.LedgerlakeError, exit_code: int
) -> None:
    assert pickle.loads(pickle.dumps(error)).exit_code == exit_code


def test_retrying_is_decided_by_the_error_alone() -> None:
    assert errors.is_retryable(errors.DeadlineError("x"))
    assert errors.is_retryable(errors.BrokerError("x", code="ServiceNotReady"))
    assert not errors.is_retryable(errors.BrokerError("x", code="AuthorizationError"))
    # A newer broker has codes that are not known here.
    assert not errors.is_retryable(errors.BrokerError("x", code="4711"))
    assert not errors.is_retryable(errors.UsageError("x"))
    assert not errors.is_retryable(ValueError("x"))


def test_of_each_code_of_the_broker_it_is_decided_whether_it_passes_with_time() -> None:
    assert list(errors.BROKER_CODES) == list(pb.ServerError.keys())
