"""A process in the place of a replica: `HOW` is the model that it is told to load, and what it does instead."""

from __future__ import annotations

import os
import socket
import sys
import time

from batchwright.errors import UnsupportedModel
from batchwright.inference.replicas.messages import (
    HEADER_BYTES,
    Broken,
    Ready,
    Refused,
    ReplicaSpec,
    decode_for_replica,
    encoded_error,
    frame,
    length_of,
)
from batchwright.inference.replicas.replica import ReplicaFacts


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    file = connection.makefile("rb")
    spec = decode_for_replica(file.read(length_of(file.read(HEADER_BYTES))))
    assert isinstance(spec, ReplicaSpec)
    if spec.model == "dies while it loads":
        os._exit(3)
    if spec.model == "refuses":
        connection.sendall(frame(Refused(encoded_error(UnsupportedModel("not this one")))))
        return
    connection.sendall(frame(Ready(ReplicaFacts(("odd",), ("/v1/completions",), 4, 1000, 100))))
    if spec.model == "hangs":
        time.sleep(3600)
    file.read(HEADER_BYTES)
    if spec.model == "breaks":
        connection.sendall(frame(Broken("the device failed")))
    os._exit(70)


if __name__ == "__main__":
    main()
