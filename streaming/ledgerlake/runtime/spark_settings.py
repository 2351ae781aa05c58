"""Settings of Spark that are lists: Ledgerlake's items are added to the user's. And settings that
Spark makes arguments of a process, which must not contain a secret.
"""

from __future__ import annotations

import re

from ledgerlake.stored.secrets import may_be_secret

# What stands between the two.
_SEPARATORS = {
    "spark.jars": ",",
    "spark.jars.packages": ",",
    "spark.archives": ",",
    "spark.sql.extensions": ",",
    "spark.driver.extraJavaOptions": " ",
    "spark.executorEnv.PYTHONPATH": ":",
}

# Options of a JVM, such as spark.driver.extraJavaOptions, and what Spark takes for a secret by
# itself.
_JAVA_OPTIONS = re.compile(r"spark\..*JavaOptions")
_SECRET_NAME = r"(?:secret|password|token|access[.]?key)"
_SECRET_PROPERTY = re.compile(rf"-D[^\s=]*{_SECRET_NAME}[^\s=]*=", re.IGNORECASE)
_SECRET_SETTING = re.compile(_SECRET_NAME, re.IGNORECASE)


def names_of_visible_secrets(settings: dict[str, str]) -> list[str]:
    """Return the settings that look as if they put a secret into the arguments of a JVM, where each
    user of its machine can read it.
    """
    return [
        name
        for name, value in settings.items()
        if _JAVA_OPTIONS.fullmatch(name) and _SECRET_PROPERTY.search(value)
    ]


def secrets_of(settings: dict[str, str]) -> list[str]:
    """Return the values that Spark takes for secrets, by their names."""
    return [
        value
        for name, value in settings.items()
        if _SECRET_SETTING.search(name) and may_be_secret(value)
    ]


def join_settings(needed: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """Return both. Of two for one name the given one stands, or stands behind the needed one if it
    is a list.
    """
    joined = {
        name: f"{needed[name]}{separator}{given[name]}"
        for name, separator in _SEPARATORS.items()
        if name in needed and name in given
    }
    return needed | given | joined
