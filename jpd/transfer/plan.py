"""How KV gets from worker to worker: which split travels, how many bytes, how long on which link.

Pure arithmetic on sizes, no devices: `jpd check` prints these plans for machines that are not here.
The launcher makes the wires that are really used of the same plans, by `TransferPlan.wire`.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jpd.nn.config import DecoderConfig
from jpd.transfer.quantised import token_head_bytes
from jpd.transfer.wire import Wire


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

    The source gathers pages in `wire_partitions` parts: its own, each cut in `slices`, or fewer by
    a gather among its devices. Every target device receives one slice, or `strands` parts, which
    it writes side by side: its own share, or more, of which it then takes its share.
    """

    source: KVLayout
    target: KVLayout
    wire_partitions: int
    slices: int
    strands: int
    bytes_per_token: int  # of the sequence on the wire: all layers, all heads, once

    @property
    def is_resharded(self) -> bool:
        return self.source.partitions != self.target.partitions

    @property
    def received_bytes_per_token(self) -> int:
        """By all target devices together; more than bytes_per_token where they hold equal parts."""
        num_parts = self.wire_partitions * self.slices // self.strands
        return self.bytes_per_token * self.target.devices // num_parts

    @property
    def regrouped_bytes_per_token(self) -> float:
        """That the source's devices send to one another first, to have fewer parts."""
        missing = 1.0 / self.wire_partitions - 1.0 / self.source.partitions
        return self.bytes_per_token * self.source.devices * missing

    @property
    def busiest_link_bytes_per_token(self) -> float:
        """Through the link of the busiest device, the bound on the rate.

        With as many devices on both sides of a slice each sends to one; otherwise JAX copies a
        part to all its holders from a single device of the source.
        """
        part = self.bytes_per_token / (self.wire_partitions * self.slices)
        if self.strands > 1:
            holders = self.target.devices * self.strands // self.wire_partitions
            return part * max(holders, self.strands)
        if self.source.devices == self.target.devices // self.slices:
            return part * self.slices
        return part * (self.target.devices // self.wire_partitions)

    def wire(
        self,
        page_size: int,
        move_sizes: tuple[int, ...],
        wire_dtype: str,
        has_checksum: bool,
        layer_groups: int = 1,
    ) -> Wire:
        """The form in which pages then travel; page_size and move_sizes are the target's."""
        return Wire(
            partitions=self.wire_partitions,
            slices=self.slices,
            strands=self.strands,
            page_size=page_size,
            move_sizes=move_sizes,
            token_bytes=self.bytes_per_token,
            dtype=wire_dtype,
            has_checksum=has_checksum,
            layer_groups=layer_groups,
        )

    def seconds(self, num_tokens: int, link: Link) -> float:
        """A lower bound of the time for this many tokens, all parts travelling at once."""
        return link.seconds(num_tokens * self.busiest_link_bytes_per_token)


def kv_bytes_per_token(config: DecoderConfig, itemsize: int) -> int:
    """What one token takes in the KV cache, all layers and heads, without copies."""
    return config.num_layers * config.num_cached_heads * config.kv_width * itemsize


def wire_bytes_per_token(config: DecoderConfig, wire_dtype: str) -> int:
    """What one token takes on the wire, all layers and heads, without copies."""
    if wire_dtype != "int8":
        return kv_bytes_per_token(config, jnp.dtype(wire_dtype).itemsize)
    return config.num_layers * config.num_cached_heads * token_head_bytes(config.kv_parts)


def plan_transfer(source: KVLayout, target: KVLayout, bytes_per_token: int) -> TransferPlan:
    """The plan that moves the fewest bytes, of equals the one with the fewest arrays.

    The source's own parts are cut; parts that it has to regroup first travel whole.
    """
    common = math.gcd(source.partitions, target.partitions)
    cuts = (1, target.partitions // common) if common == source.partitions else (1,)
    plans = [
        TransferPlan(source, target, common, slices, 1, bytes_per_token)
        for slices in dict.fromkeys(cuts)
    ]
    if common == target.partitions < source.partitions:
        strands = source.partitions // common
        plans.append(TransferPlan(source, target, source.partitions, 1, strands, bytes_per_token))
    return min(plans, key=_least_moved)


def _least_moved(plan: TransferPlan) -> tuple[float, int]:
    num_bytes = plan.received_bytes_per_token + plan.regrouped_bytes_per_token
    return num_bytes, plan.slices * plan.strands
