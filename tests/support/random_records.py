"""Records of `jpd.rpc.records` with one value of another kind, or at the edge of its own.

Used by the tests that throw them at the services between jpd's own processes.
"""

import json
from random import Random
from typing import Any

ODD = (None, True, -1, 1.5, "a", "", [], {}, [[1]], {"a": 1}, float("nan"), 0, 3, 1 << 31, 1 << 70)


def spoilt(random: Random, record: bytes) -> bytes:
    """The record with an odd value somewhere, at any depth."""
    value = json.loads(record)
    places = list(_places(value))
    container, key = random.choice(places)
    container[key] = random.choice(ODD)
    return json.dumps(value).encode()


def _places(value: Any) -> Any:
    """(container, key) of everything inside."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])
