"""`python -m cgx_ops bench`: time allreduce, compressed and exact, beside other libraries.

For each message size, run() runs every contender once to find the error of its result. Then it
times them in interleaved rounds (measure.py), with a copy of the tensor for the limit. It prints a
table (results.py) and a verdict (verdict.py), and writes a report (--json) and a plot (--plot).
"""

import argparse
import ast
import faulthandler
import importlib
import platform
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

import cgx_ops
from cgx_ops import Config
from cgx_ops._core.arrays import Array
from cgx_ops._core.picture import new_figure
from cgx_ops._core.units import (
    parse_count,
    parse_milliseconds,
    parse_rate,
    parse_seconds,
    parse_size,
    rate_text,
)
from cgx_ops._core.verdicts import EXACT, NO_DIFFERENCE
from cgx_ops.autotune import choices_of
from cgx_ops.bench.measure import Summary, Timed, measure
from cgx_ops.bench.peers import PEERS, Contender, MpiRanks, cgx, cgx_name
from cgx_ops.bench.plot import draw
from cgx_ops.bench.report import Report
from cgx_ops.bench.results import Result, limit_seconds, table_of
from cgx_ops.bench.verdict import Contenders, out_of_reach, parameters_for, verdict
from cgx_ops.config import Rounding

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = ("4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB")
_COPY = "memcpy"  # timed for the limit only
_DEADLINE = 600  # seconds that a size may take beyond the budget; then all ranks end


# ---- The command line ----------------------------------------------------------------------------


def _config(text: str) -> Config:
    fields: dict[str, Any] = {}
    for each in text.split(","):
        name, _, value = each.partition("=")
        try:
            fields[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            fields[name] = value  # a word, such as topk
    try:
        return Config(**fields)
    except (cgx_ops.InvalidArgument, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid Config: {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    lines = "\n".join(f"- {name}: {peer.description}" for name, peer in PEERS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Time allreduce among the ranks that mpirun starts, compressed and exact, beside other\n"
        "libraries. At the end, a verdict compares the recommended compressed setting with the\n"
        "fastest exact way that was measured. The other libraries are:\n\n" + lines
    )
    parser.epilog = (
        'The verdict is "no difference" if the step times differ by less than '
        f"{NO_DIFFERENCE:.0%}, or if the\ninterquartile ranges of the measured times overlap."
    )
    choose = parser.add_argument
    choose(
        "--sizes",
        type=parse_size,
        nargs="+",
        default=[parse_size(s) for s in SIZES],
        help=f"message sizes in bytes (default {' '.join(SIZES)})",
    )
    choose(
        "--bits",
        type=int,
        nargs="*",
        choices=(*range(1, 9), 32),
        default=(32, 8, 4, 2),
        help="bits to measure; 32 is exact (default 32 8 4 2)",
    )
    choose(
        "--rounding",
        nargs="+",
        choices=get_args(Rounding),
        default=("nearest", "stochastic"),
        help="roundings to measure with each number of bits; the verdict is about the first one "
        "(default nearest stochastic)",
    )
    choose(
        "--config",
        dest="configs",
        type=_config,
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of one more Config to measure, such as compressor=topk,density=0.01; "
        "the verdict covers it, too",
    )
    choose(
        "--peers",
        nargs="*",
        choices=PEERS,
        help="other libraries to measure (default: all that are installed; without names: none)",
    )
    choose("--rounds", type=parse_count, default=21, help="largest number of rounds (default 21)")
    choose(
        "--budget",
        type=parse_seconds,
        default=10.0,
        help="seconds for each size (default 10)",
    )
    choose(
        "--parameters",
        type=parse_count,
        help="number of your model's parameters, for the verdict (default 25000000, or the values "
        "of the largest size if the sizes are much smaller)",
    )
    choose(
        "--compute",
        type=parse_milliseconds,
        metavar="MS",
        help="milliseconds of your model's step without communication. The verdict then compares "
        "step times: compute, then one allreduce of all gradients, without overlap",
    )
    choose("--link-rate", type=parse_rate, help="rate of each host's link, for the limit: 1gbit")
    choose("--json", metavar="FILE", help="write the results to this file, too")
    choose("--plot", metavar="FILE", help="draw the measured times: a .png, .svg or .pdf file")
    parser.set_defaults(run=run)


# ---- Running -------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status. The failure of one rank ends all ranks."""
    try:
        communicator = cgx_ops.init()
    except cgx_ops.CgxError as error:  # such as a variable that is not accepted
        return _refuse(str(error))
    if communicator.size == 1:
        return _refuse(
            "an allreduce needs two ranks or more, and this process is alone. Start it with the "
            "mpirun of this environment:\n"
            "    mpirun -n 2 python -m cgx_ops bench\n"
            "As root add --allow-run-as-root, with more ranks than cores --oversubscribe, on "
            "several hosts --host a,b."
        )
    try:
        from mpi4py import MPI
    except ImportError as error:
        return _refuse(f"mpi4py cannot be imported ({error}): pip install mpi4py")
    try:
        found = _problem(options, writes=MPI.COMM_WORLD.rank == 0)
        problem = next(filter(None, MPI.COMM_WORLD.allgather(found)), "")
        if problem:
            return _refuse(problem) if MPI.COMM_WORLD.rank == 0 else 2
        report, results = _measure_all(MPI.COMM_WORLD, options)
        if MPI.COMM_WORLD.rank == 0:
            for table in report.tables:
                table.print()
            if options.json:
                report.write(options.json)
            if options.plot:
                draw(options.plot, report.tables[0].title, results)
                print(f"The measured times are drawn in {options.plot}.")
    except BaseException:  # the other ranks would wait for this one until their deadline
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    return 0


def _refuse(problem: str) -> int:
    print(f"python -m cgx_ops bench: {problem}", file=sys.stderr, flush=True)
    return 2


def _problem(options: argparse.Namespace, *, writes: bool = True) -> str:
    """Return why these options cannot be used, "" if they can. This takes no measurement.

    Args:
        options: Those of the command.
        writes: Whether this rank writes the files.
    """
    try:
        _available(options.peers)
    except ImportError as error:
        return f"--peers: {error}"
    if options.parameters is not None:
        reason = out_of_reach(options.parameters, options.sizes)
        if reason:
            return f"--parameters: no verdict is possible from these sizes. {reason}"
    for option in ("json", "plot"):
        path = getattr(options, option)
        if not (writes and path):
            continue
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if option == "plot":
                new_figure(path, 1, 1)
            else:
                open(path, "a").close()
        except (cgx_ops.CgxError, OSError) as error:
            return f"--{option}: {error}"
    return ""


def _measure_all(
    world: "MPI.Intracomm", options: argparse.Namespace
) -> tuple[Report, list[Result]]:
    peers, notes = _available(options.peers)
    hosts = len(set(world.allgather(platform.node())))
    configs = [
        Config(bits=bits, rounding=rounding)
        for bits in options.bits
        for rounding in (options.rounding if bits < EXACT else ("nearest",))
    ] + options.configs
    results = []
    for size in options.sizes:
        faulthandler.dump_traceback_later(_DEADLINE + options.budget, exit=True)
        results += _measure_size(world, size, peers, configs, hosts, options)
        faulthandler.cancel_dump_traceback_later()
    settings: dict[str, Any] = {
        "ranks": world.size,
        "hosts": hosts,
        "transport": cgx_ops.init().transport,
        "link_rate": options.link_rate,
    }
    where = f"{world.size} ranks on {hosts} host{'s'[: hosts > 1]}, {settings['transport']}"
    if options.link_rate:
        where += f", links of {rate_text(options.link_rate)}"
    lines, settings["verdict"] = _verdict(results, options)
    table = table_of(f"allreduce of fp32, {where}", results, notes + lines)
    report = Report("allreduce", settings, [result.record() for result in results], [table])
    return report, results


def _verdict(
    results: list[Result], options: argparse.Namespace
) -> tuple[list[str], dict[str, Any]]:
    """Return the verdict as sentences, and as plain values for the report."""
    compressed = [bits for bits in options.bits if bits != EXACT]
    # bits_for() chooses from these by default: fewer bits need error feedback.
    choices = [bits for bits in compressed if bits in choices_of(Config())] or compressed
    contenders = Contenders(
        exact=[name for name in PEERS if PEERS[name].exact] + [cgx_name(Config(bits=EXACT))],
        recommended={
            bits: cgx_name(Config(bits=bits, rounding=options.rounding[0])) for bits in choices
        },
        configs=[cgx_name(config) for config in options.configs if config.bits != EXACT],
        peers=[name for name in PEERS if not PEERS[name].exact],
    )
    parameters = options.parameters or parameters_for(options.sizes)
    lines, found = verdict(results, contenders, parameters, options.compute)
    plain = {
        "parameters": parameters,
        "compute_s": options.compute,
        "comparisons": [asdict(each) for each in found],
    }
    return lines, plain


def _available(wanted: list[str] | None) -> tuple[list[str], list[str]]:
    """Return the peers that can run here, and a sentence for each that cannot.

    Args:
        wanted: Names of peers; None for all that are installed.

    Raises:
        ImportError: A peer in `wanted` cannot run here.
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
    """Return the values that a rank contributes."""
    return np.random.default_rng(rank).standard_normal(numel, np.float32)


def _errors(world: "MPI.Intracomm", contenders: Mapping[str, Contender]) -> dict[str, float]:
    """Run each contender once; return their relative errors, computed by rank 0."""
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
