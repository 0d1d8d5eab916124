"""How the arrays of a piece get from one process into another: two transports behind one face.

`StagedTransport` sends them over the host, in parts of the gRPC stream itself: it works anywhere.
`JaxTransport` lets the devices' runtimes do it (`jax.experimental.transfer`): the stream only says
under which ticket the arrays are to be had. Used by `jpd.transfer.remote` on both ends.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.experimental import transfer as jax_transfer
from jax.sharding import SingleDeviceSharding

from jpd.errors import ConfigError, Problem
from jpd.rpc import kv_pb2 as pb
from jpd.rpc.security import with_port
from jpd.transfer.destination import Destination, distinct_shards, part_start
from jpd.transfer.notice import ArrayForm, Notice, parts
from jpd.transfer.protocol import KVPiece

TICKET_BITS = 60


class Transport(Protocol):
    """One of each per process."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str:
        """Where it gives arrays away, if not in the stream."""
        ...

    def serve(self, piece: KVPiece) -> Iterator[pb.PullResponse]:
        """The source's end of a pull, on a thread of its service."""
        ...

    def pull(
        self, notice: Notice, responses: Iterator[pb.PullResponse], target: Destination
    ) -> tuple[jax.Array, ...]:
        """The destination's end: the arrays of the uncut wire. Blocks; raises when bytes lack."""
        ...


class StagedTransport:
    """Over the memory of both hosts."""

    name = "host_staged"
    address = ""

    def serve(self, piece: KVPiece) -> Iterator[pb.PullResponse]:
        for index, array in enumerate(piece.arrays):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for start, end in parts(len(data)):
                yield pb.PullResponse(array=index, start=start, data=data[start:end].tobytes())

    def pull(
        self, notice: Notice, responses: Iterator[pb.PullResponse], target: Destination
    ) -> tuple[jax.Array, ...]:
        buffers = [form.empty() for form in notice.arrays]
        views = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
        num_left = sum(len(view) for view in views)
        for part in responses:
            data = np.frombuffer(part.data, np.uint8)
            views[part.array][part.start : part.start + len(data)] = data
            num_left -= len(data)
        if num_left:
            raise ConnectionError(f"{num_left} bytes of the piece did not come")
        return target.put(notice.wire, buffers)


class JaxTransport:
    """From devices to devices, by the runtime's own sockets. Every shard travels once.

    Its pulls have no acknowledgement and cannot be taken back: a ticket is given out when the
    destination is about to use it, and the stream around it says when it has.
    """

    name = "jax_transfer"

    def __init__(self, device: jax.Device, address: str) -> None:
        """`address`: host and port (0: a free one). Raises RuntimeError where JAX has no such."""
        try:
            self._server = jax_transfer.start_transfer_server(device.client, address, [address])
        except Exception as error:  # the runtime's own kinds
            raise RuntimeError(f"jax.experimental.transfer is not there: {error}") from error
        self.address = str(self._server.address())
        self._connections: dict[str, jax_transfer.TransferConnection] = {}

    def serve(self, piece: KVPiece) -> Iterator[pb.PullResponse]:
        ticket = secrets.randbits(TICKET_BITS)
        shards = [shard for array in piece.arrays for shard in distinct_shards(array)]
        self._server.await_pull(ticket, shards)
        yield pb.PullResponse(ticket=ticket)

    def pull(
        self, notice: Notice, responses: Iterator[pb.PullResponse], target: Destination
    ) -> tuple[jax.Array, ...]:
        ticket = next(responses).ticket
        if notice.transport_address not in self._connections:
            self._connections[notice.transport_address] = self._server.connect(
                notice.transport_address
            )
        source = self._connections[notice.transport_address]
        if notice.wire.strands > 1:
            parts = source.pull(ticket, _wanted_parts(notice, target))
            return target.weave(notice.wire, notice.arrays, parts)
        wanted = _Wanted(notice, target)
        shards = source.pull(ticket, wanted.shards)
        jax.block_until_ready(shards)
        moved = wanted.assembled(shards)
        jax.block_until_ready(moved)
        return target.join(notice.wire, moved)


def make_transport(name: str, address: str) -> Transport:
    """The transport of this name for this process. Raises ConfigError where it is not there."""
    if name == StagedTransport.name:
        return StagedTransport()
    try:
        return JaxTransport(jax.devices()[0], with_port(address, 0))
    except RuntimeError as error:
        raise ConfigError([Problem("mesh file", "cache.transport", name, str(error))]) from error


def _wanted_parts(notice: Notice, target: Destination) -> list[jax.ShapeDtypeStruct]:
    """Of a wire with strands: each part of each array goes to the first device that needs it."""
    firsts = [devices[0] for devices in target.holders(notice.wire)]
    return [
        jax.ShapeDtypeStruct(
            (*form.shape[:2], form.shape[2] // notice.wire.partitions, form.shape[3]),
            form.empty().dtype,
            sharding=SingleDeviceSharding(device),
        )
        for form in notice.arrays
        for device in firsts
    ]


class _Wanted:
    """Where the parts of a piece's arrays go: each to one device, and from there to the others."""

    def __init__(self, notice: Notice, target: Destination) -> None:
        self._shardings = target.shardings(notice.wire, notice.arrays)
        self._forms = notice.arrays
        self.shards = [
            jax.ShapeDtypeStruct(
                sharding.shard_shape(form.shape),
                form.empty().dtype,
                sharding=SingleDeviceSharding(d),
            )
            for form, sharding in zip(self._forms, self._shardings, strict=True)
            for d in (devices[0] for devices in self._holders(form, sharding))
        ]

    def assembled(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays of the piece on the destination's mesh; copies are made where needed."""
        found: list[jax.Array] = []
        place = 0
        for form, sharding in zip(self._forms, self._shardings, strict=True):
            holders = self._holders(form, sharding)
            copies = [
                jax.device_put(shards[place + index], device)
                for index, devices in enumerate(holders)
                for device in devices
            ]
            place += len(holders)
            found.append(jax.make_array_from_single_device_arrays(form.shape, sharding, copies))
        return found

    def _holders(self, form: ArrayForm, sharding: jax.sharding.Sharding) -> list[list[jax.Device]]:
        """For each part, in order, the devices that hold it."""
        holders: dict[int, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(form.shape).items():
            assert index is not None
            holders.setdefault(part_start(index), []).append(device)
        return [holders[start] for start in sorted(holders)]
