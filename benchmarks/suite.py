"""Run the benchmarks in about 25 minutes; write reports, tables and plots to benchmarks/results/.

    make bench                                   # all parts but the long ones
    python benchmarks/suite.py [part ...]        # some; --list shows them

A part is a few runs (PARTS). Each run is one command, which is printed before it starts and writes
results/<name>.json. Runs that need missing tools are skipped with the reason. At the end all
reports of the folder, also older ones, become tables.md and the plots (plots.py).
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import hosts
import plots
from rich.console import Console

from cgx_ops._core.text_table import Table
from cgx_ops.bench.report import Report

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
_GRACE = 15  # seconds in which hosts.py, past its own deadline, shows what its ranks wrote
RESULTS = Path("benchmarks/results")  # below ROOT, so that reports name no path of this machine


@dataclass(frozen=True)
class Run:
    """A program on ranks of this machine, or of hosts made for it.

    Attributes:
        name: of its report.
        program: the words after "python"; --json FILE is added.
        ranks: on each host.
        hosts: made by hosts.py; 0: this machine itself.
        rate: of the hosts' links; None: unlimited.
        timeout: seconds until it is ended.
        makes_hosts: whether the program itself makes hosts.
    """

    name: str
    program: tuple[str, ...]
    ranks: int = 1
    hosts: int = 0
    rate: str | None = None
    timeout: int = 240
    makes_hosts: bool = False

    @property
    def report(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def refusal(self) -> str:
        """Say why it cannot run here; "" if it can."""
        return hosts.refusal() if self.hosts or self.makes_hosts else ""

    def command(self) -> list[str]:
        words = [str(BIN / "python"), *self.program, "--json", str(self.report)]
        if self.hosts:
            made = ["--hosts", str(self.hosts), "--ranks-per-host", str(self.ranks)]
            made += ["--rate", self.rate] if self.rate else []
            made += ["--timeout", str(self.timeout)]
            return [str(BIN / "python"), "benchmarks/hosts.py", *made, "--", *words]
        if self.ranks > 1:
            mpirun = [str(BIN / "mpirun"), "-n", str(self.ranks)]
            mpirun += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            return [*mpirun, "--oversubscribe", "--bind-to", "none", *words]
        return words


def allreduce(
    name: str, arguments: str, *, ranks: int = 1, hosts: int = 0, rate: str | None = None
) -> Run:
    """Return a run of `python -m cgx_ops bench`."""
    link = ("--link-rate", rate) if rate else ()
    program = ("-m", "cgx_ops", "bench", *arguments.split(), *link)
    return Run(f"allreduce-{name}", program, ranks, hosts, rate)


def training(program: str, name: str = "", rate: str = "1gbit", timeout: int = 240) -> Run:
    """Return a run of a training benchmark on 2 hosts."""
    words = (f"benchmarks/{program}.py", "--link-rate", rate)
    return Run(name or program, words, hosts=2, rate=rate, timeout=timeout)


def transports(name: str, hosts: int, rate: str | None = None) -> Run:
    """Return a run of MPI beside TCP."""
    link = ("--link-rate", rate) if rate else ()
    program = ("benchmarks/transports.py", "--sizes", "4KiB", "64MiB", *link)
    return Run(f"transports-{name}", program, hosts=hosts, rate=rate)


def pairs_of_ranks(program: str, rate: str) -> tuple[Run, ...]:
    """Return a run with 2 ranks on each of 2 hosts, and one on each of 4."""
    words = (f"benchmarks/{program}.py", "--link-rate", rate)
    return tuple(
        Run(f"{program}-{rate}-{hosts}x2", words, ranks=2, hosts=hosts, rate=rate, timeout=2400)
        for hosts in (2, 4)
    )


def variable_lengths(rate: str, hosts: int, size: str) -> Run:
    """Return a run of codes of variable length between hosts."""
    words = ("benchmarks/variable_lengths.py", "--link-rate", rate, "--size", size)
    words += ("--budget", "90")
    return Run(f"variable_lengths-{rate}-{hosts}", words, hosts=hosts, rate=rate, timeout=600)


PARTS: dict[str, tuple[Run, ...]] = {
    "shm": (
        allreduce("shm-2", "--budget 5", ranks=2),
        *(
            allreduce(
                f"shm-{ranks}",
                "--budget 5 --sizes 64KiB 256KiB 1MiB 4MiB 16MiB 64MiB --peers mpi gloo fp16",
                ranks=ranks,
            )
            for ranks in (4, 8)
        ),
    ),
    "links": (
        allreduce("1gbit-2", "--budget 6 --sizes 64KiB 1MiB 16MiB 64MiB", hosts=2, rate="1gbit"),
        allreduce(
            "1gbit-4",
            "--budget 8 --sizes 1MiB 64MiB --peers mpi gloo fp16 powersgd",
            hosts=4,
            rate="1gbit",
        ),
        allreduce(
            "100mbit-2",
            "--budget 35 --sizes 64KiB 1MiB 16MiB --peers mpi gloo fp16 powersgd "
            "--rounding nearest --config compressor=levels,bits=2 compressor=levels,bits=1 "
            "compressor=topk,density=0.015625,bucket_size=4096,value_bits=8",
            hosts=2,
            rate="100mbit",
        ),
        allreduce("unshaped-2", "--budget 6 --sizes 64KiB 1MiB 16MiB 64MiB", hosts=2),
    ),
    "exchange": tuple(
        Run(
            f"exchange-1gbit-{hosts}",
            ("benchmarks/exchange.py", "--link-rate", "1gbit"),
            hosts=hosts,
            rate="1gbit",
        )
        for hosts in (2, 4)
    ),
    "host_blocks": pairs_of_ranks("host_blocks", "1gbit"),
    "transports": (
        transports("1gbit-2", 2, "1gbit"),
        transports("1gbit-4", 4, "1gbit"),
        transports("unshaped-2", 2),
    ),
    "steps": (
        training("ddp_step"),
        training("ddp_step", "ddp_step-100mbit", "100mbit", timeout=600),
        training("ddp_step", "ddp_step-10gbit", "10gbit"),
        training("jax_step"),
    ),
    "convergence": (
        Run(
            "convergence-characters",  # convergence.json has all tasks, which take 1.5 hours
            (
                *("benchmarks/convergence.py", "--tasks", "characters", "--hosts", "2"),
                *("--seeds", "0", "--budget", "8"),
                *("--methods", "gloo, fp16", "gloo, PowerSGD", "exact", "4 bits", "PowerSGD"),
            ),
            makes_hosts=True,
        ),
    ),
    "calls": (Run("calls", ("benchmarks/calls.py",), ranks=2),),
    "memory": (Run("memory", ("benchmarks/memory.py",), ranks=2),),
    "codec": (Run("codec", ("benchmarks/codec.py",), timeout=400),),
    "growth": (Run("growth", ("benchmarks/growth.py",)),),
    "simulator": (
        Run(
            "simulator",
            ("benchmarks/simulator.py", "--plot", str(RESULTS / "simulator.png")),
            makes_hosts=True,
        ),
    ),
    "host_blocks_100mbit": pairs_of_ranks("host_blocks", "100mbit"),
    "sharded": (
        *pairs_of_ranks("sharded_steps", "1gbit"),
        *pairs_of_ranks("sharded_steps", "100mbit"),
    ),
    "variable_lengths": (
        variable_lengths("100mbit", 2, "16MiB"),
        variable_lengths("1gbit", 2, "64MiB"),
        variable_lengths("1gbit", 4, "64MiB"),
    ),
}
# only when they are named: 40 minutes
LONG_PARTS = ("host_blocks_100mbit", "sharded", "variable_lengths")


def run(one: Run, variables: Mapping[str, str] | None = None) -> str:
    """Run it to its end, with more variables; return "done", or what went wrong."""
    one.report.unlink(missing_ok=True)  # should it fail, an old one must not pass for its own
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    process = subprocess.Popen(one.command(), env=environment)
    try:
        status = process.wait(one.timeout + _GRACE)
    except subprocess.TimeoutExpired:
        return f"ran past {one.timeout} s"
    finally:
        process.terminate()  # mpirun ends its ranks, hosts.py all that it made
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
    return f"failed with status {status}" if status else "done"


def write_tables(reports: list[Report]) -> None:
    """Write the tables of all reports as Markdown."""
    newest = max(reports, key=lambda report: report.machine["date"])
    versions = ", ".join(f"{name} {number}" for name, number in newest.machine["versions"].items())
    text = [
        "# Results of the benchmarks",
        "Written by `make bench`; how to read them: [README.md](../README.md).",
        f"{newest.machine['mpi']}, {versions}; {newest.machine['platform']}.",
    ]
    for report in reports:
        where = "{cpu}, {cores} cores, {date}".format(**report.machine)
        for table in report.tables:
            text += [table.markdown(), f"{where}: `{report.command}`"]
    (RESULTS / "tables.md").write_text("\n\n".join(text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the benchmarks and collects the results.")
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], metavar="part", help="all short ones if none"
    )
    parser.add_argument("--list", action="store_true", help="show the parts and their commands")
    options = parser.parse_args()
    os.chdir(ROOT)
    console = Console(highlight=False, markup=False)
    rows, failed = [], False
    for part in options.parts or PARTS:
        if part in LONG_PARTS and not options.parts and not options.list:
            continue
        for one in PARTS[part]:
            command = shlex.join(one.command()).replace(f"{BIN}/", "")
            if options.list:
                console.print(f"{part:12} {command}", soft_wrap=True)
                continue
            console.rule(f"{part}: {one.name}")
            console.print(command, soft_wrap=True)
            begin, refusal = time.monotonic(), one.refusal()
            outcome = f"skipped: {refusal}" if refusal else run(one)
            failed |= not refusal and outcome != "done"
            rows.append([part, one.name, f"{time.monotonic() - begin:.0f}", outcome])
    if options.list:
        return
    reports = [Report.read(path) for path in sorted(RESULTS.glob("*.json"))]
    if reports:
        write_tables(reports)
        plots.draw(RESULTS)
    Table("runs", ["part", "run", "seconds", "outcome"], rows).print()
    sys.exit(failed)


if __name__ == "__main__":
    main()
