"""Where all rooms meet: configuration, the Spark session, and the pipeline put together."""

from ledgerlake.query.assemble import messages, rejects, run
from ledgerlake.query.config import Config, load_config
from ledgerlake.query.typed import typed

__all__ = ["Config", "load_config", "messages", "rejects", "run", "typed"]
