"""A program: the service that connects JAX's processes, in a separate process.

    coordinator.py HOST PORT PROCESSES SECONDS

By default JAX's process 0 runs this service, and every process that loses it is aborted: if process
0 is killed, no process is left to report an error. This program outlives all of them. It does not
end the other processes when one dies, and does not wait for all at their end: cgx reports both. It
does the following, in order:

  1. start the service at PORT, or at a free port if that is 0. If HOST, the address by which the
     processes reach it, is the loopback of this machine, it listens only there
  2. print "<port> <lifeline> <word>": a second port, to which every process connects within
     SECONDS, and the word that it sends there. Connections that send anything else are ignored
  3. end when all these connections have ended, which means that their processes have

It does not import JAX, which would take longer than all of this, so it does not use compat.py.
"""

import contextlib
import hmac
import secrets
import selectors
import socket
import sys
import time

from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # a module without stubs

_SILENCE_S = 24 * 3600  # JAX's limit for a silent process; its connections end sooner
# Where to listen, by host. For all other hosts: on all interfaces.
_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "::1"}


def main() -> None:
    """Serve until all processes have ended."""
    host, port = sys.argv[1].strip("[]"), int(sys.argv[2])
    processes, seconds = int(sys.argv[3]), float(sys.argv[4])
    bind = _LOOPBACK.get(host, "")
    word = secrets.token_hex(16)
    with _listen(bind) as lifeline:
        if port == 0:
            with _listen(bind) as probe:
                port = probe.getsockname()[1]
        at = f"[{bind}]" if ":" in bind else bind or "[::]"
        service = _jax.get_distributed_runtime_service(
            f"{at}:{port}", processes, heartbeat_timeout=_SILENCE_S, recoverable=True
        )
        print(port, lifeline.getsockname()[1], word, flush=True)
        for end in _connections(lifeline, processes, word.encode(), seconds):
            end.setblocking(True)
            with contextlib.suppress(ConnectionError):
                end.recv(1)
    service.shutdown()


def _listen(address: str) -> socket.socket:
    """Listen at one address, or at all addresses of this machine if it is ""."""
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, dualstack_ipv6=dual)


def _connections(
    lifeline: socket.socket, processes: int, word: bytes, seconds: float
) -> list[socket.socket]:
    """Return the connections of all processes, identified by the word; none if one is missing."""
    deadline = time.monotonic() + seconds
    known: list[socket.socket] = []
    lifeline.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(lifeline, selectors.EVENT_READ)
        while len(known) < processes:
            ready = selector.select(max(0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return []  # a process failed before it connected
            for key, _ in ready:
                if key.fileobj is lifeline:
                    try:
                        end = lifeline.accept()[0]
                        end.setblocking(False)
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                        selector.register(end, selectors.EVENT_READ, data=b"")
                    except OSError:  # it has closed again, or descriptors are exhausted
                        time.sleep(0.05)
                    continue
                end = key.fileobj
                assert isinstance(end, socket.socket)
                chunk = b""
                with contextlib.suppress(OSError):
                    chunk = end.recv(len(word) - len(key.data))
                received = key.data + chunk
                if chunk and len(received) < len(word):
                    selector.modify(end, selectors.EVENT_READ, data=received)
                    continue
                selector.unregister(end)
                if hmac.compare_digest(received, word):
                    known.append(end)
                else:
                    end.close()
    return known


main()
