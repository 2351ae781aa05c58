"""The former place of ``ledgerlake.api``; what was imported from here still is."""

from ledgerlake.api import Config, load_config, messages, rejects, run, typed

__all__ = ["Config", "load_config", "messages", "rejects", "run", "typed"]
