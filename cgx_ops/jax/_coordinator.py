"""A program: the service by which JAX's processes find each other, in a process of its own.

    _coordinator.py PORT PROCESSES SECONDS

JAX has its process 0 run this service, and aborts every process that loses it: when process 0 is
killed, nobody lives to see an error. Here it outlives any of them. It does not end the others when
one dies, nor does it wait for all at their end: cgx tells of both. In this order:

  1. start the service at PORT, or at a free port if that is 0
  2. print "<port> <lifeline>", another port, to which every process connects within SECONDS
  3. end when all these connections have: their processes did, however they ended

It does not import JAX, which would take longer than all of this, and so stands apart from
_compat.py.
"""

import contextlib
import socket
import sys

from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # a module without stubs

_SILENCE_S = 24 * 3600  # after which JAX would call a process dead; its connections tell sooner


def main() -> None:
    """Serve until all processes have ended."""
    port, processes, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    if port == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
    service = _jax.get_distributed_runtime_service(
        f"[::]:{port}", processes, heartbeat_timeout=_SILENCE_S, recoverable=True
    )
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as lifeline:
        print(port, lifeline.getsockname()[1], flush=True)
        lifeline.settimeout(seconds)
        with contextlib.suppress(TimeoutError):  # somebody failed before it came here
            ends = [lifeline.accept()[0] for _ in range(processes)]
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for end in ends:
                end.settimeout(None)
                with contextlib.suppress(ConnectionError):
                    end.recv(1)
    service.shutdown()


main()
