"""`batchwright serve` as a process: its address and certificate, uvicorn around the services, and how it stops."""

from __future__ import annotations

import asyncio
import math
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from batchwright.errors import InputError, RunFailed
from batchwright.server.app import create_app
from batchwright.server.connections.acceptor import Acceptor
from batchwright.server.connections.connection_places import ConnectionPlaces, default_places
from batchwright.server.connections.patience import ConnectionTimeouts
from batchwright.server.connections.protocol import Connection
from batchwright.service.composition import Services, open_services
from batchwright.service.observability.logs import configure_logging, logger
from batchwright.service.process_memory import exempt_loaded_objects, return_large_blocks
from batchwright.service.settings import Settings, is_loopback

_LAST_SECONDS = 1
"""Seconds for answers to leave once nothing is computed any more."""
_TICKS_OF_A_SWEEP = 10
"""uvicorn's ticks, ten a second, between two sweeps of the connections."""


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises `RunFailed` when the address cannot be used, `InputError` for an address that needs an API key while there is
    none and for an unusable certificate, and what opening the store and loading the model raise.
    """
    configure_logging(settings.log_format, settings.log_level)
    return_large_blocks()
    # Checked before the model is loaded, which takes long.
    tls = tls_of(settings)
    listener = _bound(settings.host, settings.port)
    with listener, asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(_serve(settings, listener, tls))


async def _serve(settings: Settings, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    async with open_services(settings) as services:
        server = server_of(services, listener, tls)
        exempt_loaded_objects()
        await server.serve(sockets=[listener])
    logger.info("stopped")


def server_of(services: Services, listener: socket.socket, tls: ssl.SSLContext | None = None) -> Server:
    """Return a server for `services` on a bound socket."""
    config = uvicorn.Config(
        create_app(services),
        # Unlike httptools, which uvicorn prefers where it is installed, h11 limits the size of headers.
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=math.ceil(services.settings.idle_timeout),
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    return Server(config, services, listener, tls)


class Server(uvicorn.Server):
    """uvicorn's server with an `Acceptor`. It stops in two steps: at a signal it takes no new work; once all work is
    answered, or the time for that is over, it exits.
    """

    def __init__(
        self, config: uvicorn.Config, services: Services, listener: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._services = services
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._until = math.inf
        settings = services.settings
        self._timeouts = ConnectionTimeouts(settings.header_timeout, settings.write_timeout)
        most = settings.max_connections_per_address
        self._places: ConnectionPlaces[Connection] = ConnectionPlaces(_places(settings), most)
        self.acceptor = Acceptor(
            listener,
            self._connect,
            places=self._places,
            clock=services.clock,
            figures=services.connections,
            handshake_timeout=settings.header_timeout,
            tls=tls,
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        if not self.started:
            return
        self.servers.append(self.acceptor)  # type: ignore[arg-type]
        self.acceptor.start()
        if self.acceptor.tls is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        _greet(self._services, self._listener)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The signal interrupts the event loop anywhere, so the loop is asked to stop the server.
        self._loop.call_soon_threadsafe(self._stop, sig)

    def _stop(self, sig: int) -> None:
        if self._services.draining:
            self.should_exit = True
            self.force_exit = self.force_exit or sig == signal.SIGINT
            return
        self._services.drain()
        grace = self._services.settings.drain_grace
        self._until = self._services.clock.now() + grace
        logger.info("draining", requests=self._services.online.inside, grace_seconds=grace)

    def _reload(self) -> None:
        try:
            self.acceptor.tls = tls_of(self._services.settings)
        except InputError as error:
            logger.error("certificate_kept", error=str(error))
        else:
            logger.info("certificate_loaded")

    async def on_tick(self, counter: int) -> bool:
        """Do periodic work, and return whether to exit. Called by uvicorn ten times a second."""
        if counter % _TICKS_OF_A_SWEEP == 0:
            self.acceptor.sweep()
        late = self._services.clock.now() >= self._until
        if late:
            # `middleware.BodyMiddleware` answers each of them, within uvicorn's own timeout.
            for task in self.server_state.tasks:
                task.cancel()
        finished = self._services.draining and (self._services.online.inside == 0 or late)
        return await super().on_tick(counter) or finished

    def _connect(self, on_close: Callable[[Connection], None]) -> Connection:
        return Connection(
            self.config,
            self.server_state,
            self.lifespan.state,
            timeouts=self._timeouts,
            places=self._places,
            clock=self._services.clock,
            on_close=on_close,
        )


def _places(settings: Settings) -> int:
    """Return the largest number of connections."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    upstream = 0 if settings.backend == "engine" else settings.backend_concurrency
    places = settings.max_connections or default_places(descriptors, upstream=upstream)
    if places >= descriptors:
        logger.warning("max_connections_unreachable", max_connections=places, descriptors=descriptors)
    return places


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address. Raises `RunFailed`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise RunFailed(f"--host {host}: there is no such address ({error.strerror})") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise RunFailed(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port, or 0 for any"
        ) from error
    return listener


def _greet(services: Services, listener: socket.socket) -> None:
    """Log the address and who can reach it, and print that on a terminal."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if services.settings.tls_cert is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    loopback = is_loopback(services.settings.host)
    logger.info("serving", url=url, models=list(services.inference.models), loopback_only=loopback)
    if not sys.stderr.isatty():
        return
    lines = [
        f"batchwright serves {', '.join(services.inference.models)}"
        if services.inference.models
        else f"batchwright waits for {services.settings.backend}, which does not answer yet",
        f"  dashboard  {url}/",
        f"  API        {url}/v1",
        f"  data       {services.settings.data}",
    ]
    if loopback:
        lines.append("  Only this machine can reach it. For others: batchwright keys create NAME, then --host 0.0.0.0")
    print("\n".join(lines), file=sys.stderr)


def tls_of(settings: Settings) -> ssl.SSLContext | None:
    """Return the context with the settings' certificate; None: plain HTTP.

    Read at the start and at every SIGHUP. Raises `InputError` in one line for a certificate or key that cannot be used.
    """
    certificate, key = settings.tls_cert, settings.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None:
        raise InputError(f"tls_key={str(key)!r}: give its certificate, too, as tls_cert (--tls-cert)")
    if key is None:
        raise InputError(f"tls_cert={str(certificate)!r}: give its key, too, as tls_key (--tls-key)")
    for setting, path in (("tls_cert", certificate), ("tls_key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise InputError(f"{setting}={str(path)!r}: the file cannot be read ({error.strerror})") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except _Encrypted:
        raise InputError(f"tls_key={str(key)!r}: the key has a password; give one without") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"tls_key={str(key)!r}: the key is not that of tls_cert={str(certificate)!r}"
        else:
            why = (
                f"tls_cert={str(certificate)!r}, tls_key={str(key)!r}: not a certificate (with its chain) and its key, "
                f"both in PEM ({error.reason or error})"
            )
        raise InputError(why) from error
    return context


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    # Without this function OpenSSL would ask for the password on the terminal.
    raise _Encrypted
