"""Targets of what people write: configuration, options, bounds, times, names; and of cancels and
repetitions, which producers write.
"""

from __future__ import annotations

import json
import warnings
from itertools import islice
from typing import TYPE_CHECKING, Any

from ledgerlake.client.auth import parse_authentication, tls_files
from ledgerlake.client.topics import (
    TopicSelection,
    full_name,
    full_pattern,
    join_partition,
    split_partition,
)
from ledgerlake.client.transport import parse_service_url
from ledgerlake.errors import CorruptEntryError, OffsetError, UsageError
from ledgerlake.options.bounds import (
    parse_bound,
    parse_end,
    parse_index,
    parse_start,
    parse_time_ms,
)
from ledgerlake.options.config import Config, read_config
from ledgerlake.options.kinds import duration_ms
from ledgerlake.options.source_options import parse_options
from ledgerlake.schedules.cancels import parse_cancel
from ledgerlake.schedules.repetition import occurrences, parse_repetition
from ledgerlake.wire.message_id import Position
from tests.fuzz import mutate
from tests.fuzz.engine import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fuzz.mutate import Rng

_TOML = """
[source]
service_url = "pulsar+ssl://localhost:6651"
topics = ["persistent://public/default/orders", "b"]
starting = "2026-05-01T08:00:00+02:00"
ending = "before 7:3"
max_rows_per_trigger = 1_000
min_partitions = 3
max_trigger_delay = "15 minutes"
crypto_key_folder = "keys"
[auth]
method = "token"
token = "env:TOKEN"
[tls]
ca_file = "ca.pem"
[stream]
name = "orders"
trigger = "1 second"
[delta]
path = "lake/orders"
[chunks]
max_pending = 10
expire_after = "1 hour"
[delay]
storage = "state"
time_step_per_segment = "5 minutes"
[deliver]
topic = "due"
[metrics]
port = 9464
"""
_TOML_WORDS = [
    "0x7f",
    "1e400",
    "nan",
    "1979-05-27T07:32:00",
    "[[",
    "]]",
    '"""',
    "'''",
    "= {",
    "[a.b]",
    "\n[source]\n",
    "\\uD800",
    "\r",
    "true",
    "[1, 'a']",
]

_OPTIONS = {
    "service.url": "pulsar+ssl://a:6651,b", "topics": "a,b", "startingOffsets": '{"a": "7:3", "b": "latest"}', "endingTime": "1700000000000",
    "maxRowsPerTrigger": "10", "minRowsPerTrigger": "5", "maxTriggerDelay": "30s", "minPartitions": "2", "subscription": "s", "schema": "auto",
    "pulsar.client.authPluginClassName": "token", "pulsar.client.authParams": "token:abc", "pulsar.client.proxyServiceUrl": "pulsar+ssl://p:6651",
    "retryTimeoutMs": "100", "cryptoKeyFolder": "keys", "cryptoFailureAction": "pass", "failOnDataLoss": "false", "path": "x",
}  # fmt: skip
_MORE_OPTIONS = {
    "topic": "t", "topicsPattern": "orders-.*", "view": "compat", "startingIndex": "5", "endingOffsets": "index 9", "startingTime": "2026-05-01T08:00:00Z",
    "messagePayloadProcessor": "a.b:c", "payloadToMessageIdConverter": "a:b", "maxUncompressedBytes": "5", "readCompacted": "true", "kafka.x": "1",
    "startingOffsets": '{"version": 1, "positions": {"a": {"ledger": 7, "entry": 3}}}', "pulsar.client.tlsAllowInsecureConnection": "true",
    "pulsar.reader.cryptoFailureAction": "consume", "admin.url": "http://x", "pulsar.client.authParams": '{"issuerUrl": "http://i", "client_id": "a", "client_secret": "b"}',
}  # fmt: skip

_BOUNDS = [
    "earliest", "latest", "cursor", "7:3", "after 7:3", "before 7:3:1", "7:1;7:3", "index 5", "2026-05-01T08:00:00Z", "2026-05-01T08:00:00.123+02:00",
    "1700000000000", "080710031800", "30s", "15 minutes", "200 milliseconds", "1h", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999-14:00",
]  # fmt: skip
_NAMES = [
    "orders", "tenant/ns/orders", "persistent://a/b/c-partition-3", "non-persistent://a/b/c", "orders-.*", "a/b/(x|y)+", "pulsar://h:6650,i/", "pulsar+ssl://[::1]:6651",
    "token:abc", "file:/x", "user:password", "tlsCertFile:a,tlsKeyFile:b", '{"issuerUrl": "https://i", "privateKey": "file:/k"}', "data:application/json;base64,e30=",
]  # fmt: skip


def _texts(texts: list[str]) -> Callable[[Rng], bytes]:
    return lambda rng: mutate.text(rng, rng.choice(texts), texts).encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _a_configuration(rng: Rng) -> bytes:
    lines = _TOML.strip().split("\n")
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(lines))
        kind = rng.randrange(6)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 2:
            name = lines[at].partition("=")[0]
            lines[at] = f"{name}= {rng.choice([json.dumps(mutate.json_value(rng)), *_TOML_WORDS])}"
        elif kind == 3:
            name, _, value = lines[at].partition('"')
            lines[at] = f'{name}"{mutate.text(rng, value.rstrip(chr(34)), _BOUNDS + _NAMES)}"'
        elif kind == 4:
            lines[at] = mutate.text(rng, lines[at], _TOML_WORDS)
        else:
            lines[at] += rng.choice(_TOML_WORDS)
        lines = lines or [""]
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutate.some_bytes(rng, data) if rng.random() < 0.1 else data


def _judge_configuration(data: bytes) -> int:
    config = read_config(data, "fuzz.toml")
    assert isinstance(config, Config)
    config.pipeline_delay, config.chunks.limits, config.subscription, config.outbox_place  # noqa: B018
    assert parse_options(config.source_options()) == config.source
    return 1


def _some_options(rng: Rng) -> bytes:
    options: dict[str, Any] = dict(_OPTIONS)
    for _ in range(rng.choice([1, 2, 3])):
        name = rng.choice([*options, *_MORE_OPTIONS])
        kind = rng.randrange(5)
        if kind == 0:
            options.pop(name, None)
        elif kind == 1:
            options[name] = _MORE_OPTIONS.get(name, options.get(name))
        elif kind == 2:
            options[mutate.text(rng, name)] = options.pop(name, "x")
        else:
            options[name] = mutate.text(
                rng, options.get(name) or _MORE_OPTIONS.get(name, ""), [*_BOUNDS, *_NAMES]
            )
        options = options or dict(_OPTIONS)
    return json.dumps(options).encode()


def _judge_options(data: bytes) -> int:
    option_texts = json.loads(data)
    options = parse_options({str(name): str(value) for name, value in option_texts.items()})
    options.starting_of("persistent://public/default/a-partition-0", "latest")
    options.ending_of("persistent://public/default/a")
    hash(options)
    return 1


def _judge_bound(data: bytes) -> int:
    """Every reader of a text; what all of them refuse is refused."""
    text = _text(data)
    readers: list[Callable[[], Any]] = [
        lambda: parse_bound(text, "there"),
        lambda: parse_start(text, "there"),
        lambda: parse_end(text, "there"),
        lambda: parse_time_ms(text, "there"),
        lambda: parse_index(text, "there"),
        lambda: duration_ms("there", text),
    ]
    refused = [error for read in readers if (error := _refusal(read)) is not None]
    if len(refused) == len(readers):
        raise refused[0]
    return 1


def _judge_name(data: bytes) -> int:
    # Python's own opinion of a pattern, which is the user's.
    warnings.simplefilter("ignore", FutureWarning)
    text = _text(data)
    readers: list[Callable[[], Any]] = [
        lambda: full_name(text),
        lambda: TopicSelection(pattern=full_pattern(text)).matches(
            "persistent://public/default/orders-1-partition-3"
        ),
        lambda: parse_service_url(text),
        *(
            lambda plugin=plugin: parse_authentication(plugin, text, "there")
            for plugin in ("token", "basic", "tls", "oauth2", text)
        ),
    ]
    tls_files(text)
    assert join_partition(*split_partition(text)) == text
    refused = [error for read in readers if (error := _refusal(read)) is not None]
    if len(refused) == len(readers):
        raise refused[0]
    return 1


def _refusal(read: Callable[[], Any]) -> UsageError | None:
    try:
        read()
    except UsageError as error:
        return error
    return None


def _judge_cancel(data: bytes) -> int:
    """A producer's word: never an error."""
    cancel = parse_cancel(_text(data), Position(7, 3), 1_700_000_000_000)
    return 0 if cancel is None else 1


_REPETITIONS = [
    {
        "ledgerlake.cron": "*/5 1-3,7 1,L * MON-FRI",
        "ledgerlake.timezone": "Europe/Berlin",
        "ledgerlake.count": "9",
    },
    {
        "ledgerlake.cron": "0 30 2 LW 2/3 5L,MON#5",
        "ledgerlake.until": "1777626000123",
        "ledgerlake.jitter": "P1D",
    },
    {
        "ledgerlake.every": "R5/2026-05-02T09:00:00+02:00/P1Y2M3W4DT5H6M7.8S",
        "ledgerlake.catchup": "last",
    },
    {
        "ledgerlake.every": "PT15M",
        "ledgerlake.until": "2027-01-01T00:00:00Z",
        "ledgerlake.jitter": "PT1.5S",
    },
]
_CRON_WORDS = ["*", "*/", "/", ",", "-", "#", "L", "LW", "W", "SUN", "mon", "FEB", "0", "1", "2", "7", "29", "30", "31", "59", "60", "9" * 30]  # fmt: skip


def _a_repetition(rng: Rng) -> bytes:
    """Changed properties, or a cron expression of any words."""
    properties = rng.choice(_REPETITIONS)
    if rng.random() < 0.6:
        return mutate.json_text(rng, json.dumps(properties)).encode("utf-8", "surrogatepass")
    fields = [
        "".join(rng.choices(_CRON_WORDS, k=rng.choice([1, 1, 1, 2, 3, 8])))
        for _ in range(rng.choice([5, 6]))
    ]
    return json.dumps(
        {"ledgerlake.timezone": "Europe/Berlin", "ledgerlake.cron": " ".join(fields)}
    ).encode()


def _judge_repetition(data: bytes) -> int:
    try:
        properties = json.loads(_text(data))
    except (ValueError, RecursionError):
        return 0
    repetition = parse_repetition(properties) if isinstance(properties, dict) else None
    if repetition is None:
        return 0
    starts_ms = (1_325_000_000_000, 1_798_761_599_999, 221_876_927_000_000)
    found = [
        occurrence
        for start_ms in starts_ms
        for occurrence in islice(occurrences(repetition, "a", start_ms), 3)
    ]
    assert all(
        0 <= occurrence.due_ms - occurrence.nominal_ms <= repetition.jitter_ms
        for occurrence in found
    )
    return len(found)


TARGETS = [
    Target("configuration", "options.config: TOML", _a_configuration, _judge_configuration, (UsageError,)),
    Target("options", "source.options, compat_options", _some_options, _judge_options, (UsageError, OffsetError)),
    Target("bounds", "source.options: bounds, times, indexes, durations", _texts(_BOUNDS), _judge_bound, (UsageError,)),
    Target("names", "client.topics, transport, auth: names, patterns, urls, credentials", _texts(_NAMES), _judge_name, (UsageError,)),
    Target("cancel", "schedules.cancels: the property of a message", _texts(["id=7:3", "key=k", "id=7:1;7:3", "id=080710031800", "id=[8, 7]", "none"]), _judge_cancel),
    Target("repetition", "schedules.repetition: the properties of a message", _a_repetition, _judge_repetition, (CorruptEntryError,)),
]  # fmt: skip
