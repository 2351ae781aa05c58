"""One version of a topic's schema, as the broker's registry keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from ledgerlake.pb import pulsar_pb2 as pb


@dataclass(frozen=True)
class ValueSchema:
    """The kind, by the protocol's number, and the definition, in the language of that kind."""

    kind: int = pb.Schema.NoSchema
    definition: bytes = b""
    properties: tuple[tuple[str, str], ...] = ()

    @property
    def kind_name(self) -> str:
        return (
            pb.Schema.Type.Name(self.kind)
            if self.kind in pb.Schema.Type.values()
            else str(self.kind)
        )


NO_SCHEMA = ValueSchema()


def from_wire(schema: pb.Schema) -> ValueSchema:
    properties = sorted((entry.key, entry.value) for entry in schema.properties)
    return ValueSchema(schema.type, schema.schema_data, tuple(properties))
