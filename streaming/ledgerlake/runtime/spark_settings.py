"""Settings of Spark that are lists of things: what is needed and what a user gives go together."""

from __future__ import annotations

# What stands between the two.
_SEPARATORS = {
    "spark.jars": ",",
    "spark.jars.packages": ",",
    "spark.archives": ",",
    "spark.sql.extensions": ",",
    "spark.driver.extraJavaOptions": " ",
    "spark.executorEnv.PYTHONPATH": ":",
}


def join_settings(needed: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """Return both. Of two for one name the given one stands, or stands behind the needed one if it is
    a list.
    """
    joined = {
        name: f"{needed[name]}{separator}{given[name]}"
        for name, separator in _SEPARATORS.items()
        if name in needed and name in given
    }
    return needed | given | joined
