"""What a program imports: the pipeline, its streams as DataFrames, the session, the sources and the
sinks.

from ledgerlake.api import load_config, messages, run, start_session
"""

from ledgerlake.inspect.delayed_messages import waiting
from ledgerlake.inspect.typed import typed
from ledgerlake.monitor.progress import lags_of
from ledgerlake.options.config import Config, load_config, parse_config
from ledgerlake.pipeline.pipeline import Pipeline, run
from ledgerlake.pipeline.streams import messages, rejects
from ledgerlake.publish.datasource import LedgerlakeDataSource
from ledgerlake.publish.large_messages import LargeMessageProducer
from ledgerlake.publish.schedules import Schedules
from ledgerlake.runtime.session import start_session

__all__ = [
    "Config",
    "LargeMessageProducer",
    "LedgerlakeDataSource",
    "Pipeline",
    "Schedules",
    "lags_of",
    "load_config",
    "messages",
    "parse_config",
    "rejects",
    "run",
    "start_session",
    "typed",
    "waiting",
]
