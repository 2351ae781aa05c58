"""The former place of ``ledgerlake.api.start_session``."""

from ledgerlake.runtime.session import start_session

__all__ = ["start_session"]
