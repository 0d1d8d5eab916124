"""How KV gets from worker to worker: which split travels, how many bytes, how long on which link.

Pure arithmetic on sizes, no devices: `jpd check` prints these plans for machines that are not here.
The same rule (the wire's split is the gcd of both sides') gives the meshes that the transfer really
uses, by `jpd.parallel.mesh.wire_view`.
"""

import math
from dataclasses import dataclass

from jpd.nn.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Link:
    """What connects two devices: peak rate in one direction, and where the figure comes from."""

    name: str
    bytes_per_second: float
    source: str

    def seconds(self, num_bytes: float) -> float:
        """At peak rate, without latency: a lower bound."""
        return num_bytes / self.bytes_per_second


LINKS = (
    Link("NVLink 4", 450e9, "NVIDIA H200 data sheet: 900 GB/s per GPU, both directions together"),
    Link("PCIe 5.0 x16", 64e9, "NVIDIA H200 data sheet: 128 GB/s, both directions together"),
    Link(
        "RDMA 400 Gb/s", 50e9, "NVIDIA ConnectX-7 data sheet: 400 Gb/s per port, one port per GPU"
    ),
)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one worker holds its KV pool."""

    partitions: int  # distinct parts of the head axis: gcd(cached heads, tensor)
    devices: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How KV goes from one worker's mesh to another's.

    The source gathers pages in `wire_partitions` parts (a local slice, or a gather among its own
    devices), every target device receives one of these parts, and slices its own share from it.
    """

    source: KVLayout
    target: KVLayout
    wire_partitions: int
    bytes_per_token: int  # of the sequence: all layers, all heads, once

    @property
    def is_resharded(self) -> bool:
        return self.source.partitions != self.target.partitions

    @property
    def received_bytes_per_token(self) -> int:
        """By all target devices together; more than bytes_per_token where they hold equal parts."""
        return self.bytes_per_token * self.target.devices // self.wire_partitions

    @property
    def busiest_link_bytes_per_token(self) -> float:
        """Through the link of the busiest device, the bound on the rate.

        With as many devices on both sides each sends to one; otherwise JAX copies a part to all its
        holders from a single device of the source.
        """
        part = self.bytes_per_token / self.wire_partitions
        if self.source.devices == self.target.devices:
            return part
        return part * (self.target.devices // self.wire_partitions)

    def seconds(self, num_tokens: int, link: Link) -> float:
        """A lower bound of the time for this many tokens, all parts travelling at once."""
        return link.seconds(num_tokens * self.busiest_link_bytes_per_token)


def kv_bytes_per_token(config: DecoderConfig, itemsize: int) -> int:
    """What one token takes in the KV cache, all layers and heads, without copies."""
    return config.num_layers * config.num_cached_heads * config.kv_width * itemsize


def plan_transfer(source: KVLayout, target: KVLayout, bytes_per_token: int) -> TransferPlan:
    """The plan from one layout to another."""
    wire_partitions = math.gcd(source.partitions, target.partitions)
    return TransferPlan(source, target, wire_partitions, bytes_per_token)
