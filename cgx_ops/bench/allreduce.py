"""`python -m cgx_ops bench`: allreduce beside what a user would take instead, and the limit.

Phases for each size: every contender once, for the error of its result; interleaved rounds
(measure.py), a copy of the tensor among them. Then a table (results.py), a verdict in one sentence
and, with --json, a report.
"""

import argparse
import ast
import faulthandler
import importlib
import platform
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

import cgx_ops
from cgx_ops import Config
from cgx_ops._core.arrays import Array
from cgx_ops._core.units import parse_count, parse_rate, parse_seconds, parse_size, rate_text
from cgx_ops._core.verdicts import EXACT, Timings, sentence
from cgx_ops.autotune import choices_of
from cgx_ops.bench.measure import Summary, Timed, measure
from cgx_ops.bench.peers import PEERS, Contender, MpiRanks, cgx, cgx_name
from cgx_ops.bench.report import Report
from cgx_ops.bench.results import Result, limit_seconds, table_of
from cgx_ops.config import Rounding

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = ("4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB")
_COPY = "memcpy"  # the contender that is a limit
_DEADLINE = 600  # seconds beyond the budget that a size may take; then all ranks end


# ---- The command line ----------------------------------------------------------------------------


def _config(text: str) -> Config:
    fields: dict[str, Any] = {}
    for each in text.split(","):
        name, _, value = each.partition("=")
        try:
            fields[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            fields[name] = value  # a word
    try:
        return Config(**fields)
    except (cgx_ops.InvalidArgument, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no Config: {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    lines = "\n".join(f"  {name:10} {peer.description}" for name, peer in PEERS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Times allreduce among the ranks that mpirun starts.\n\npeers:\n" + lines
    choose = parser.add_argument
    choose(
        "--sizes",
        type=parse_size,
        nargs="+",
        default=[parse_size(s) for s in SIZES],
        help=f"of the tensors (default {' '.join(SIZES)})",
    )
    choose(
        "--bits",
        type=int,
        nargs="*",
        choices=(*range(1, 9), 32),
        default=(32, 8, 4, 2),
        help="a contender each; 32: exact (default 32 8 4 2)",
    )
    choose(
        "--rounding",
        nargs="+",
        choices=get_args(Rounding),
        default=("nearest", "stochastic"),
        help="of each number of bits (default nearest and stochastic)",
    )
    choose(
        "--config",
        dest="configs",
        type=_config,
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of a Config, such as compressor=topk,density=0.01: another contender each",
    )
    choose(
        "--peers",
        nargs="*",
        choices=PEERS,
        help="without names: none; default: all there are",
    )
    choose("--rounds", type=parse_count, default=21, help="at most (default 21)")
    choose(
        "--budget",
        type=parse_seconds,
        default=10.0,
        help="seconds for each size (default 10)",
    )
    choose(
        "--parameters",
        type=parse_count,
        default=25_000_000,
        help="of your model: the verdict tells what a step takes (default 25000000)",
    )
    choose("--link-rate", type=parse_rate, help="of each host, as in 1gbit: for the limit")
    choose("--json", metavar="FILE", help="also write the results there")
    parser.set_defaults(run=run)


# ---- Running -------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status. A failure of one rank ends all."""
    if cgx_ops.init().size == 1:
        print(
            "python -m cgx_ops bench: an allreduce takes two ranks or more, and this process is "
            "alone. Start it by the mpirun of this environment:\n"
            "    mpirun -n 2 python -m cgx_ops bench\n"
            "(as root with --allow-run-as-root; with more ranks than cores --oversubscribe; on "
            "several hosts --host a,b)",
            file=sys.stderr,
        )
        return 2
    try:
        from mpi4py import MPI
    except ImportError as error:
        print(f"python -m cgx_ops bench: {error}: pip install mpi4py", file=sys.stderr)
        return 2
    try:
        report = _measure_all(MPI.COMM_WORLD, options)
        if MPI.COMM_WORLD.rank == 0:
            for table in report.tables:
                table.print()
            if options.json:
                report.write(options.json)
    except BaseException:  # the others would wait for this rank for ever
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    return 0


def _measure_all(world: "MPI.Intracomm", options: argparse.Namespace) -> Report:
    peers, notes = _available(options.peers)
    hosts = len(set(world.allgather(platform.node())))
    configs = [
        Config(bits=bits, rounding=rounding)
        for bits in options.bits
        for rounding in (options.rounding if bits < 32 else ("nearest",))
    ] + options.configs
    results = []
    for size in options.sizes:
        faulthandler.dump_traceback_later(_DEADLINE + options.budget, exit=True)
        results += _measure_size(world, size, peers, configs, hosts, options)
        faulthandler.cancel_dump_traceback_later()
    settings = {
        "ranks": world.size,
        "hosts": hosts,
        "transport": cgx_ops.init().transport,
        "link_rate": options.link_rate,
    }
    where = f"{world.size} ranks on {hosts} host{'s'[: hosts > 1]}, {settings['transport']}"
    if options.link_rate:
        where += f", links of {rate_text(options.link_rate)}"
    notes += _verdict(results, options)
    table = table_of(f"allreduce of fp32, {where}", results, notes)
    return Report("allreduce", settings, [result.record() for result in results], [table])


def _verdict(results: list[Result], options: argparse.Namespace) -> list[str]:
    """Return whether compression pays, in one sentence, in the bits that "auto" would choose from.

    None without times of exact and of bits, or of sizes that do not rise.
    """
    names = {
        bits: cgx_name(Config(bits=bits, rounding=options.rounding[0]))
        for bits in options.bits
        if bits in (EXACT, *choices_of(Config()))
    }
    seconds = {
        bits: tuple(result.seconds for result in results if result.contender == name)
        for bits, name in names.items()
    }
    if EXACT not in seconds or len(seconds) < 2 or sorted({*options.sizes}) != options.sizes:
        return []
    timings = Timings(tuple(size // 4 for size in options.sizes), seconds)
    return [sentence(timings, options.parameters)]


def _available(wanted: list[str] | None) -> tuple[list[str], list[str]]:
    """Return the peers that can run here, and a sentence on those that cannot.

    Raises ImportError if one that was asked for cannot.
    """
    names, notes = [], []
    for name in wanted if wanted is not None else PEERS:
        try:
            if PEERS[name].needs:
                importlib.import_module(PEERS[name].needs)
            names.append(name)
        except ImportError as error:
            if wanted is not None:
                raise
            notes.append(f"{name} is left out: {error}.")
    return names, notes


def _measure_size(
    world: "MPI.Intracomm",
    size: int,
    peers: list[str],
    configs: list[Config],
    hosts: int,
    options: argparse.Namespace,
) -> list[Result]:
    x = _values(world.rank, size // 4)
    out = np.empty_like(x)
    contenders = {name: PEERS[name].build(x, out) for name in peers}
    contenders |= {cgx_name(config): cgx(x, out, config) for config in configs}
    errors = _errors(world, contenders)
    timed = {_COPY: Timed(lambda: np.copyto(out, x))}
    timed |= {name: Timed(each.call, each.prepare) for name, each in contenders.items()}
    samples = measure(timed, MpiRanks(world), rounds=options.rounds, budget=options.budget)
    found = {name: Summary.of(seconds) for name, seconds in samples.items()}
    exact = [found[name].median for name in peers if PEERS[name].exact]
    return [
        Result(
            name,
            world.size,
            size,
            *(
                found[name].median,
                found[name].lower,
                found[name].upper,
                found[name].rounds,
            ),
            error=errors[name],
            limit_seconds=limit_seconds(
                found[_COPY].median, contender.wire_bytes, hosts, options.link_rate
            ),
            exact_seconds=min(exact, default=None),
        )
        for name, contender in contenders.items()
    ]


def _values(rank: int, numel: int) -> Array:
    """Return what a rank contributes."""
    return np.random.default_rng(rank).standard_normal(numel, np.float32)


def _errors(world: "MPI.Intracomm", contenders: Mapping[str, Contender]) -> dict[str, float]:
    """Run each contender once and return the relative errors, which rank 0 finds."""
    exact: Array | None = None
    errors = {}
    for name, contender in contenders.items():
        contender.prepare()
        contender.call()
        if world.rank == 0:
            found = contender.result()
            if exact is None:
                exact = np.zeros(found.size)  # fp64
                for rank in range(world.size):
                    exact += _values(rank, found.size)
            errors[name] = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    return world.bcast(errors)
