"""A shop: four topics, one configuration, five tables, and an analyst's queries over kills.

    orders      Avro, three versions of the schema in turn
    events      JSON without a schema, some of it broken
    payments    Protobuf
    customers   JSON by key, with deletions

Producers of pulsar-client publish without pause, on a broker that trims ledgers that were read. The
pipeline is killed again and again. Then Spark, Polars and DuckDB answer the queries from the
tables, and plain Python from what the producers had confirmed.

    python -m tests.live.shop --kills 10 --folder /tmp/shop
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import polars as pl
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pulsar import schema as ps

from ledgerlake.runtime.session import start_session
from tests.live.campaign import default_broker, end_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.live.runtime import Runtime

CONFIG = """\
tables = [
  {{ path = "{lake}/all" }},
  {{ path = "{lake}/orders", topics_pattern = "orders", shape = "record" }},
  {{ path = "{lake}/views", topics_pattern = "events", shape = "record", json_fields = {fields}, sql = "{views}" }},
  {{ path = "{lake}/payments", topics_pattern = "payments", shape = "record", partition_by = ["date(pulsar.broker_timestamp) as day"] }},
  {{ path = "{lake}/customers", topics_pattern = "customers", shape = "record", mode = "latest" }},
]
[source]
service_url = "{service_url}"
topics = ["orders", "events", "payments", "customers"]
[stream]
name = "shop"
checkpoint = "{checkpoint}"
[delta]
rejects_path = "{lake}/rejects"
"""
FIELDS = '{ kind = "string", page = "string", ms = "int" }'
VIEWS = "select page, ms from messages where kind = 'view'"

# One query for each table: Spark, DuckDB and Polars all take it.
QUERIES = {
    "all": "select count(*) as n, sum(length(producer_name)) as x from t group by topic order by "
    "topic",
    "orders": "select customer, count(*) as n, sum(quantity) as q, count(note) as notes from t "
    "group by customer order by customer",
    "views": "select page, count(*) as n, sum(ms) as ms from t group by page order by page",
    "payments": "select method, count(*) as n, sum(cents) as cents from t where day is not null "
    "group by method order by method",
    "customers": "select city, count(*) as n, min(name) as first from t group by city order by "
    "city",
}
_TOPICS = ("orders", "events", "payments", "customers")


class OrderOne(ps.Record):
    id = ps.Long(required=True)
    customer = ps.String(required=True)
    quantity = ps.Integer(required=True)


class OrderTwo(ps.Record):
    id = ps.Long(required=True)
    customer = ps.String(required=True)
    quantity = ps.Integer(required=True)
    note = ps.String()


class OrderThree(ps.Record):
    id = ps.Long(required=True)
    customer = ps.String(required=True)
    quantity = ps.Integer(required=True)
    price = ps.Double()


OrderOne.__name__ = OrderTwo.__name__ = OrderThree.__name__ = "Order"


class Customer(ps.Record):
    name = ps.String(required=True)
    city = ps.String(required=True)


@dataclass
class Shop:
    """The producers, and what they had confirmed: by topic, the values with their message ids."""

    runtime: Runtime
    rng: random.Random
    confirmed: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _failures: list[str] = field(default_factory=list)

    def open(self) -> None:
        client = self.runtime.client()
        # The producers of three versions publish at the same time.
        self.runtime._call(
            "PUT", "namespaces/public/default/schemaCompatibilityStrategy", "ALWAYS_COMPATIBLE"
        )
        for topic in _TOPICS:
            self.runtime.admin("PUT", f"persistent://public/default/{topic}")
        self._payment = _payments(self.runtime)
        avro = {"batching_enabled": True, "batching_max_publish_delay_ms": 5}
        self._orders = [
            client.create_producer("orders", schema=ps.AvroSchema(kind), **avro)
            for kind in (OrderOne, OrderTwo, OrderThree)
        ]
        self._events = client.create_producer("events", **avro)
        self._payments = client.create_producer("payments", **avro)
        self._customers = client.create_producer(
            "customers", schema=ps.JsonSchema(Customer), batching_enabled=False
        )
        self._deletions = client.create_producer("customers", batching_enabled=False)

    def publish(self, until: threading.Event, pause_s: float) -> None:
        """Publish until the event is set."""
        number = 0
        while not until.is_set():
            number += 1
            self._order(number)
            self._event(number)
            self._pay(number)
            self._customer()
            time.sleep(pause_s)
        for producer in (
            *self._orders,
            self._events,
            self._payments,
            self._customers,
            self._deletions,
        ):
            producer.flush()
            producer.close()
        assert not self._failures, self._failures[0]

    def _send(self, producer: Any, topic: str, content: Any, value: Any, **options: Any) -> None:
        def confirm(result: Any, message_id: Any) -> None:
            with self._lock:
                if str(result) != "Result.Ok":
                    self._failures.append(f"{topic}: {result}")
                self.confirmed[topic].append((message_id, value))

        producer.send_async(content, confirm, **options)

    def _order(self, number: int) -> None:
        version = self.rng.randrange(3)
        values: dict[str, Any] = {
            "id": number,
            "customer": f"c{self.rng.randrange(9)}",
            "quantity": self.rng.randrange(5),
        }
        versions: list[dict[str, Any]] = [{}, {"note": f"note {number}"}, {"price": number / 4}]
        more = versions[version]
        kind: Any = (OrderOne, OrderTwo, OrderThree)[version]
        self._send(self._orders[version], "orders", kind(**values, **more), values | more)

    def _event(self, number: int) -> None:
        event = {
            "kind": self.rng.choice(["view", "view", "click"]),
            "page": f"/{self.rng.randrange(6)}",
            "ms": number % 700,
        }
        is_broken = self.rng.random() < 0.02
        content = b"{broken" if is_broken else json.dumps(event).encode()
        self._send(self._events, "events", content, None if is_broken else event)

    def _pay(self, number: int) -> None:
        payment = {
            "id": number,
            "method": self.rng.choice(["card", "cash"]),
            "cents": self.rng.randrange(10_000),
        }
        self._send(
            self._payments, "payments", self._payment(**payment).SerializeToString(), payment
        )

    def _customer(self) -> None:
        key = f"k{self.rng.randrange(200)}"
        if self.rng.random() < 0.15:
            self._send(self._deletions, "customers", None, (key, None), partition_key=key)
            return
        customer = {
            "name": f"n{self.rng.randrange(10_000):04}",
            "city": self.rng.choice(["Bonn", "Lyon", "Oslo"]),
        }
        self._send(
            self._customers, "customers", Customer(**customer), (key, customer), partition_key=key
        )

    def answers(self) -> dict[str, list[tuple[Any, ...]]]:
        """What the queries have to answer, by plain Python."""
        values = {topic: [value for _, value in sent] for topic, sent in self.confirmed.items()}
        orders: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for order in values["orders"]:
            row = orders[order["customer"]]
            row[0], row[1], row[2] = (
                row[0] + 1,
                row[1] + order["quantity"],
                row[2] + ("note" in order),
            )
        views: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for event in values["events"]:
            if event is not None and event["kind"] == "view":
                views[event["page"]][0] += 1
                views[event["page"]][1] += event["ms"]
        paid: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for payment in values["payments"]:
            paid[payment["method"]][0] += 1
            paid[payment["method"]][1] += payment["cents"]
        latest: dict[str, Any] = {}
        in_order = sorted(
            self.confirmed["customers"], key=lambda sent: (sent[0].ledger_id(), sent[0].entry_id())
        )
        for _, (key, customer) in in_order:
            latest[key] = customer
        cities: dict[str, list[str]] = defaultdict(list)
        for customer in latest.values():
            if customer is not None:
                cities[customer["city"]].append(customer["name"])
        return {
            "all": [(len(values[topic]),) for topic in sorted(values)],
            "orders": [(name, *row) for name, row in sorted(orders.items())],
            "views": [(page, *row) for page, row in sorted(views.items())],
            "payments": [(method, *row) for method, row in sorted(paid.items())],
            "customers": [(city, len(names), min(names)) for city, names in sorted(cities.items())],
        }

    @property
    def broken(self) -> int:
        return sum(value is None for _, value in self.confirmed["events"])


def _payments(runtime: Runtime) -> Callable[..., Any]:
    """Register the schema of payments; return the class of its messages."""
    file = descriptor_pb2.FileDescriptorProto(name="payment.proto", package="shop", syntax="proto3")
    payment = file.message_type.add(name="Payment")
    for number, (name, kind) in enumerate({"id": 3, "method": 9, "cents": 5}.items(), 1):
        payment.field.add(name=name, number=number, type=kind, label=1)
    files = descriptor_pb2.FileDescriptorSet(file=[file])
    definition = {
        "fileDescriptorSet": base64.b64encode(files.SerializeToString()).decode(),
        "rootMessageTypeName": "shop.Payment",
        "rootFileDescriptorName": "payment.proto",
    }
    body = {"type": "PROTOBUF_NATIVE", "schema": json.dumps(definition), "properties": {}}
    runtime.admin("POST", "schemas/public/default/payments", "/schema", body)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made: Callable[..., Any] = message_factory.GetMessageClass(
        pool.FindMessageTypeByName("shop.Payment")
    )
    return made


def run(folder: Path, kills: int, seed: int, pause_s: float = 0.004) -> list[str]:
    """Play the shop; return the faults, and print the comparisons."""
    rng = random.Random(seed)
    lake = folder / "lake"
    with default_broker() as runtime:
        config = folder / "shop.toml"
        config.write_text(
            CONFIG.format(
                lake=lake,
                fields=FIELDS,
                views=VIEWS,
                service_url=runtime.service_url,
                checkpoint=folder / "checkpoint",
            )
        )
        shop = Shop(runtime, rng)
        shop.open()
        ended = threading.Event()
        publisher = threading.Thread(target=shop.publish, args=(ended, pause_s))
        publisher.start()
        try:
            for number in range(kills):
                _run_and_kill(config, folder, rng, number)
        finally:
            ended.set()
            publisher.join()
        subprocess.run([*_command("run", config), "--once"], check=True, timeout=600)
        subprocess.run(_command("verify", config), check=True, timeout=600)
    return judge(shop, lake)


def judge(shop: Shop, lake: Path) -> list[str]:
    """Compare the answers of all engines with the answers of plain Python."""
    expected = shop.answers()
    spark = start_session("shop", "local[2]")
    wrong = []
    for name, query in QUERIES.items():
        path = str(lake / name)
        spark.read.format("delta").load(path).createOrReplaceTempView("t")
        rows = pl.read_delta(path)
        answers = {
            "Spark": [tuple(row) for row in spark.sql(query).collect()],
            "Polars": pl.SQLContext(t=rows).execute(query).collect().rows(),
            "DuckDB": duckdb.connect().register("t", rows.to_arrow()).sql(query).fetchall(),
        }
        if name == "all":
            answers = {engine: [row[:1] for row in found] for engine, found in answers.items()}
        wrong += [
            f"{engine} on {name}: {found[:3]}, and not {expected[name][:3]}"
            for engine, found in answers.items()
            if found != expected[name]
        ]
        print(
            f"{name}: {rows.height:,} rows, {len(expected[name])} rows of the answer, "
            f"{len(answers)} engines"
        )
    spark.stop()
    rejects = (
        Counter(pl.read_delta(str(lake / "rejects"))["reason"].to_list())
        if shop.broken
        else Counter()
    )
    if rejects != ({"schema_mismatch": shop.broken} if shop.broken else {}):
        wrong.append(f"rejects are {dict(rejects)}, and {shop.broken} events were broken")
    print(
        f"{sum(map(len, shop.confirmed.values())):,} messages confirmed, {shop.broken} broken, "
        f"{len(wrong)} wrong answers"
    )
    return wrong


def _command(command: str, config: Path) -> list[str]:
    return [sys.executable, "-m", "ledgerlake.cli", command, str(config)]


def _run_and_kill(config: Path, folder: Path, rng: random.Random, number: int) -> None:
    """Start the pipeline, and kill it with all that it started, some time after its first
    commit.
    """
    log = folder / "lake/all/_delta_log"
    before = len(list(log.glob("*.json")))
    with open(folder / f"run-{number}.log", "wb") as output:
        running = subprocess.Popen(
            _command("run", config), stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + 120
    while len(list(log.glob("*.json"))) <= before + 1:
        assert running.poll() is None, (folder / f"run-{number}.log").read_text()[-2000:]
        assert time.monotonic() < deadline, "the pipeline commits nothing"
        time.sleep(0.05)
    time.sleep(rng.uniform(0.0, 4.0))
    end_group(running)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.live.shop", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where tables and logs stay")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ledgerlake-shop-"))
    folder.mkdir(parents=True, exist_ok=True)
    wrong = run(folder, options.kills, options.seed)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    sys.exit(main())
