"""The messages of Envoy's rate-limit service v3 and of `grpc.health.v1`.

Names, numbers and types are those of the public `.proto` files; fields that we neither read nor write are left out, and
protobuf skips them. The classes are in a separate pool, so that they do not collide with generated classes of the same
messages. `docs/decisions/0024-envoy-messages.md` has the reason.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

OK, OVER_LIMIT = 1, 2
"""Codes of a status."""

SERVING = 1
NOT_SERVING = 2
"""Statuses of `grpc.health.v1`."""

_TYPES = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _TYPES.TYPE_STRING,
    "int32": _TYPES.TYPE_INT32,
    "int64": _TYPES.TYPE_INT64,
    "uint32": _TYPES.TYPE_UINT32,
    "uint64": _TYPES.TYPE_UINT64,
    "enum": _TYPES.TYPE_INT32,  # an enum has the encoding of an int32
}
"""Types by the name in a `.proto` file. All other names are messages."""

_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Entry": {"key": (1, "string"), "value": (2, "string")},
    "RateLimitOverride": {"requests_per_unit": (1, "uint32"), "unit": (2, "enum")},
    "UInt64Value": {"value": (1, "uint64")},
    "RateLimitDescriptor": {
        "entries": (1, "repeated Entry"),
        "limit": (2, "RateLimitOverride"),
        "hits_addend": (3, "UInt64Value"),
    },
    "RateLimitRequest": {
        "domain": (1, "string"),
        "descriptors": (2, "repeated RateLimitDescriptor"),
        "hits_addend": (3, "uint32"),
    },
    "RateLimit": {"requests_per_unit": (1, "uint32"), "unit": (2, "enum"), "name": (3, "string")},
    "Duration": {"seconds": (1, "int64"), "nanos": (2, "int32")},
    "DescriptorStatus": {
        "code": (1, "enum"),
        "current_limit": (2, "RateLimit"),
        "limit_remaining": (3, "uint32"),
        "duration_until_reset": (4, "Duration"),
    },
    "HeaderValue": {"key": (1, "string"), "value": (2, "string")},
    "RateLimitResponse": {
        "overall_code": (1, "enum"),
        "statuses": (2, "repeated DescriptorStatus"),
        "response_headers_to_add": (3, "repeated HeaderValue"),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "enum")},
}
"""Number and type of each field."""

_PACKAGE = "headgate.envoy"


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="headgate/envoy.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, spec) in fields.items():
            kind = spec.removeprefix("repeated ")
            message.field.add(
                name=field,
                number=number,
                label=_TYPES.LABEL_OPTIONAL if kind == spec else _TYPES.LABEL_REPEATED,
                type=_SCALARS.get(kind, _TYPES.TYPE_MESSAGE),
                type_name=None if kind in _SCALARS else f".{_PACKAGE}.{kind}",
            )
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file().SerializeToString())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


RateLimit = _class("RateLimit")
RateLimitRequest = _class("RateLimitRequest")
RateLimitResponse = _class("RateLimitResponse")
HealthCheckRequest = _class("HealthCheckRequest")
HealthCheckResponse = _class("HealthCheckResponse")
