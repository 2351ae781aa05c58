"""``[spark]``: the Spark session that a command of ``ledgerlake`` starts.

A setting of the user's stands above the one that Ledgerlake would choose, except where both are
lists of things that Spark needs at once (see ``runtime.spark_settings``).
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace

from ledgerlake.errors import SetupError, UsageError
from ledgerlake.options.declared import option
from ledgerlake.options.kinds import LIST, PATH, SETTINGS, TEXT
from ledgerlake.runtime.spark_settings import join_settings

# Where an executor unpacks the bundle.
_BUNDLE_FOLDER = "ledgerlake_bundle"

_MASTER = re.compile(r"local($|\[|-cluster\[)|yarn$|(spark|k8s)://")
_MEMORY = re.compile(r"\d+[kmgt]b?", re.IGNORECASE)

# A task is tried four times; ``local[*]`` alone would try it once.
LOCAL_MASTER = "local[*,4]"


@dataclass(frozen=True, kw_only=True)
class SparkConfig:
    """``[spark]``: where Spark runs, and with what settings."""

    master: str = option(
        TEXT,
        LOCAL_MASTER,
        "Spark's master, such as `local[4,4]`, `spark://host:7077`, `yarn` or "
        "`k8s://https://host:443`.",
        toml="spark.master",
    )
    memory: str = option(TEXT, "2g", "The heap of the driver's JVM.", toml="spark.memory")
    packages: tuple[str, ...] = option(
        LIST,
        (),
        "Maven packages that Spark fetches, as `group:artifact:version`.",
        toml="spark.packages",
    )
    bundle: str = option(
        PATH,
        "",
        "An archive of `ledgerlake bundle`, which Spark brings to executors on other machines.",
        toml="spark.bundle",
    )
    settings: tuple[tuple[str, str], ...] = option(
        SETTINGS,
        (),
        "Other settings of Spark, by their names; `--conf KEY=VALUE` adds to them. Relative paths "
        "in them begin where Spark starts.",
        toml="spark.settings",
        is_secret=True,
    )

    def __post_init__(self) -> None:
        if not _MASTER.match(self.master):
            raise UsageError(
                f"[spark] master '{self.master}' is none of Spark's; write for example "
                "'local[2,4]' or 'spark://host:7077'"
            )
        if not _MEMORY.fullmatch(self.memory):
            raise UsageError(
                f"[spark] memory '{self.memory}' is no size; write for example '2g' or '1500m'"
            )

    @property
    def session_settings(self) -> dict[str, str]:
        """Return all settings by Spark's names."""
        packages = {"spark.jars.packages": ",".join(self.packages)} if self.packages else {}
        bundle = self._bundle_settings if self.needs_bundle else {}
        return join_settings(
            {"spark.driver.memory": self.memory, **packages, **bundle}, dict(self.settings)
        )

    @property
    def needs_bundle(self) -> bool:
        """Return whether Spark brings the bundle to executors. The executors of a local master use
        this environment.
        """
        return bool(self.bundle) and not self.master.startswith("local")

    def check_bundle(self) -> None:
        """Check that the bundle is there, if it is needed.

        Raises:
            SetupError: it is not.
        """
        if self.needs_bundle and "://" not in self.bundle and not os.path.isfile(self.bundle):
            raise SetupError(
                f"the bundle {self.bundle} does not exist; make it with: ledgerlake bundle "
                f"{self.bundle}"
            )

    @property
    def _bundle_settings(self) -> dict[str, str]:
        """Return the settings by which executors unpack the bundle, and their Python
        searches it.
        """
        return {
            "spark.archives": f"{self.bundle}#{_BUNDLE_FOLDER}",
            "spark.executorEnv.PYTHONPATH": _BUNDLE_FOLDER,
            "spark.pyspark.python": f"python{sys.version_info.major}.{sys.version_info.minor}",
        }


def with_command_line(spark: SparkConfig, master: str | None, settings: list[str]) -> SparkConfig:
    """Return the configuration with what the command line says put above it.

    Args:
        settings: texts ``KEY=VALUE``.

    Raises:
        UsageError: a text is not of that form.
    """
    pairs = []
    for text in settings:
        name, separator, value = text.partition("=")
        if not separator or not name.strip():
            raise UsageError(f"--conf '{text}' is not KEY=VALUE")
        pairs.append((name.strip(), value))
    return replace(spark, master=master or spark.master, settings=(*spark.settings, *pairs))
