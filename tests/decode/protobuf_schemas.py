"""A Protobuf schema as a topic has it, with an import, a map, an enumeration and a message that
holds itself.
"""

from __future__ import annotations

import base64
import json

from google.protobuf import descriptor_pb2

from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.value_schema import ValueSchema


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    """Two files, the one that is imported last, as no reader may rely on their order."""
    shared = descriptor_pb2.FileDescriptorProto(
        name="shared.proto", package="shop", syntax="proto3"
    )
    item = shared.message_type.add(name="Item")
    item.field.add(name="sku", number=1, type=9, label=1)
    item.field.add(name="count", number=2, type=13, label=1)
    main = descriptor_pb2.FileDescriptorProto(
        name="order.proto", package="shop", syntax="proto3", dependency=["shared.proto"]
    )
    color = main.enum_type.add(name="Color")
    color.value.add(name="RED", number=0)
    color.value.add(name="BLUE", number=1)
    order = main.message_type.add(name="Order")
    order.field.add(name="id", number=1, type=4, label=1)
    order.field.add(name="items", number=2, type=11, label=3, type_name=".shop.Item")
    order.field.add(name="color", number=3, type=14, label=1, type_name=".shop.Color")
    order.field.add(name="raw", number=4, type=12, label=1)
    order.field.add(name="first", number=5, type=11, label=1, type_name=".shop.Item")
    entry = order.nested_type.add(name="TagsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=5, label=1)
    entry.field.add(name="value", number=2, type=9, label=1)
    order.field.add(name="tags", number=6, type=11, label=3, type_name=".shop.Order.TagsEntry")
    node = main.message_type.add(name="Node")
    node.field.add(name="next", number=1, type=11, label=1, type_name=".shop.Node")
    return descriptor_pb2.FileDescriptorSet(file=[main, shared])


def protobuf(root: str) -> ValueSchema:
    definition = {
        "fileDescriptorSet": base64.b64encode(descriptors().SerializeToString()).decode(),
        "rootMessageTypeName": root,
        "rootFileDescriptorName": "order.proto",
    }
    return ValueSchema(pb.Schema.ProtobufNative, json.dumps(definition).encode())
