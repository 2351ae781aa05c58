"""What an error of the JVM's says."""

from __future__ import annotations

import pytest

from ledgerlake.runtime.java_errors import root_cause
from ledgerlake.runtime.spark_settings import secrets_of
from ledgerlake.stored.secrets import remember


@pytest.mark.parametrize(
    "name", ["spark.hadoop.fs.s3a.secret.key", "spark.sql.catalog.unity.token", "a.Password"]
)
def test_a_cause_shows_no_secret_of_sparks_settings(name: str) -> None:
    remember(*secrets_of({name: "swordfish", "spark.master": "local"}))
    long = "x" * 285
    error = RuntimeError(
        f"An error occurred\n: java.lang.Exception: no\n\tat a\nCaused by: {long} local swordfish"
    )
    assert root_cause(error) == f"{long} local ..."
