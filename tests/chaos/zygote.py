"""A process that imports what rounds need, and forks a worker on each request.

    python -m chaos.zygote ADDRESS TOKEN FOLDER FRAMEWORK

It does not start cgx or a thread, so its children are like fresh processes, but start
immediately. It reports how each of them ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from multiprocessing.connection import Client

from chaos import worker
from chaos.messages import Ended, Hello


def main() -> None:
    address, token, folder, framework = sys.argv[1:]
    worker.load(framework)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    connection = Client(address)
    connection.send(Hello(token, 0, os.getpid()))
    while True:
        ready, _, _ = select.select([connection, reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            with contextlib.suppress(ChildProcessError):
                while (child := os.waitpid(-1, os.WNOHANG))[0]:
                    connection.send(Ended(child[0], os.waitstatus_to_exitcode(child[1])))
        if connection in ready:
            try:
                name = connection.recv()
            except EOFError:
                return
            if os.fork() == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection.close()
                os.close(reader)
                os.close(writer)
                worker.serve(address, name, folder, 0, lambda: None)
                return


if __name__ == "__main__":
    main()
