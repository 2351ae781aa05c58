"""The former place of ``ledgerlake.api.lags_of``."""

from ledgerlake.pipeline.progress import lags_of

__all__ = ["lags_of"]
