"""A link between two processes that a test can cut and mend: a TCP proxy on loopback."""

import asyncio
import contextlib


class TcpLink:
    """Forwards bytes to `target` (host:port) both ways until it is cut.

    `cut(silently=True)` forwards nothing and closes nothing, as a pulled cable does.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "TcpLink":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        self._close_all()

    def cut(self, silently: bool = False) -> None:
        self._is_refusing = not silently
        self._is_open.clear()
        if not silently:
            self._close_all()

    def mend(self) -> None:
        self._is_refusing = False
        self._is_open.set()

    def _close_all(self) -> None:
        for writer in tuple(self._writers):
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            writer.close()
            return
        with contextlib.suppress(OSError):
            await self._is_open.wait()
            there, out = await asyncio.open_connection(self._host, self._port)
            self._writers |= {writer, out}
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, out))
                    group.create_task(self._pump(there, writer))
            finally:
                for end in (writer, out):
                    self._writers.discard(end)
                    end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._is_open.wait()
                writer.write(data)
                await writer.drain()
            writer.close()
