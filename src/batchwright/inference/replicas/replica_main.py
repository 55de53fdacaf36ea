"""The process of a replica: `python -m batchwright.inference.replicas.replica_main DESCRIPTOR`, a connected socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from batchwright.inference.replicas.messages import (
    HEADER_BYTES,
    Broken,
    Close,
    FromReplica,
    Loading,
    Refused,
    ReplicaSpec,
    decode_for_replica,
    encoded_error,
    frame,
    length_of,
)
from batchwright.inference.replicas.serving import BROKEN, Serving, load, take_place

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine
    from batchwright.inference.routing import RoutedInference


def main() -> None:
    """Load the model that the first message names, and answer calls until ordered to end, or the other side is gone."""
    # Ctrl-C is meant for the process that started this one, which ends it at the right time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    spec = decode_for_replica(_receive(connection, length_of(_receive(connection, HEADER_BYTES))))
    assert isinstance(spec, ReplicaSpec)
    take_place(spec)
    try:
        engine, inference = load(spec, lambda text: connection.sendall(frame(Loading(text))))
    except Exception as error:
        connection.sendall(frame(Refused(encoded_error(error))))
        return
    with contextlib.suppress(ConnectionError):
        asyncio.run(_serve(connection, spec, engine, inference))


def _receive(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            sys.exit()
        content += more
    return content


async def _serve(
    connection: socket.socket, spec: ReplicaSpec, engine: Engine | None, inference: RoutedInference
) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)

    def send(message: FromReplica) -> None:
        writer.write(frame(message))

    serving = Serving(spec, engine, inference, send, lambda reason: _break(writer, reason))
    while True:
        try:
            header = await reader.readexactly(HEADER_BYTES)
            message = decode_for_replica(await reader.readexactly(length_of(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # no one waits for an answer any more
        if isinstance(message, Close):
            break
        serving.obey(message)
    await serving.close()
    await writer.drain()
    writer.close()


def _break(writer: asyncio.StreamWriter, reason: str) -> None:
    """End this process immediately."""
    with contextlib.suppress(OSError):
        found = writer.get_extra_info("socket")
        os.set_blocking(found.fileno(), True)
        os.write(found.fileno(), frame(Broken(reason)))
    os._exit(BROKEN)


if __name__ == "__main__":
    main()
