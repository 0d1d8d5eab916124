"""Random protobufs of any kind, from their descriptors: valid ones full of odd values, and bytes.

What a message may hold is not what a server takes: every field is at the edges of its type more
often than not. Used by the tests that throw them at each service.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

MAX_ITEMS = 3
MAX_DEPTH = 6
TEXTS = (
    "",
    "a",
    "user",
    "x" * 300,
    "é\0\n\x1b",
    "{}",
    "[" * 2000,
    '{"type": "object"}',
    "(a|b",
    "-1",
)
NUMBERS = (0, 1, -1, 2, 64, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 63, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"))
BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


class RandomMessages:
    """What one seed draws. `known` has values for fields by name, taken now and then."""

    def __init__(self, seed: int, known: dict[str, list[Any]] | None = None) -> None:
        self._random, self._known = Random(seed), known or {}

    def calls(self, service: ServiceDescriptor, num_each: int) -> Iterator[tuple[str, bytes]]:
        """(path, request) for every method: messages, messages with a hole in them, and noise."""
        for number in range(num_each):
            for method in service.methods:
                data = self.message(GetMessageClass(method.input_type)).SerializeToString()
                if number % 4 == 1:
                    data = data[: self._random.randint(0, len(data))]
                if number % 4 == 2:
                    data = self._random.randbytes(self._random.randint(0, 200))
                yield path_of(method), data

    def message(self, kind: Any, depth: int = 0) -> Message:
        message: Message = kind()
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < 0.5:
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        name, is_message = field.name, field.message_type is not None
        if is_message and depth == MAX_DEPTH:
            return
        if is_message and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            getattr(message, name)[self._value(key)] = self._value(value)
        elif is_message and field.is_repeated:
            inner = GetMessageClass(field.message_type)
            items = [
                self.message(inner, depth + 1) for _ in range(self._random.randint(0, MAX_ITEMS))
            ]
            getattr(message, name).extend(items)
        elif is_message:
            inner = GetMessageClass(field.message_type)
            getattr(message, name).CopyFrom(self.message(inner, depth + 1))
        elif field.is_repeated:
            items = [self._value(field) for _ in range(self._random.randint(0, MAX_ITEMS))]
            getattr(message, name).extend(items)
        else:
            setattr(message, name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        draw = self._random
        if field.name in self._known and draw.random() < 0.7:
            return draw.choice(self._known[field.name])
        if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.randint(0, 60))
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return draw.choice(TEXTS)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        if field.cpp_type in BITS:
            low, high = BITS[field.cpp_type]
            return min(max(draw.choice(NUMBERS), low), high)
        return draw.choice(FLOATS)


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"
