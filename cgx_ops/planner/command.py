"""`python -m cgx_ops plan`: what planning gains for a user's own model on a given link.

1. the model: tensors by name, and when their gradients are ready
2. what messages cost on such a link: typical values, or those that were measured
3. the table: the same model in the usual groups and in planned ones, and a verdict
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cgx_ops._core.codec import encoded_bytes
from cgx_ops._core.table import Table
from cgx_ops._core.units import parse_count, parse_rate, parse_seconds, rate_text, time_text
from cgx_ops.config import Config
from cgx_ops.errors import CgxError, InvalidArgument
from cgx_ops.planner import baselines
from cgx_ops.planner.model import Costs, finish, timeline
from cgx_ops.planner.plan import Plan
from cgx_ops.planner.plot import draw

_BITS = (*range(1, 9), 32)
_EXACT = Config(bits=32)
_WORTH = 0.97  # of the time without compression: what is nearer than that may as well be noise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.description = (
        "Prints when the gradients of a step are reduced on a link, by groups that share a "
        "message: the usual ones, and those of cgx_ops.planner.partition."
    )
    choose = parser.add_argument
    choose(
        "sizes",
        nargs="+",
        type=_tensors,
        metavar="SIZES",
        help="of tensors, in the model's order: numbers of values, or a JSON file that maps names "
        "to a number or a shape, such as {n: list(p.shape) for n, p in model.named_parameters()}",
    )
    choose("--link", type=parse_rate, default="1gbit", help="of each host (default 1gbit)")
    choose("--hosts", type=_hosts, default=2, help="one rank on each (default 2)")
    choose("--bits", type=int, choices=_BITS[:-1], default=4, help="of a value (default 4)")
    default = Config().bucket_size
    choose("--bucket-size", type=parse_count, default=default, help=f"values (default {default})")
    choose(
        "--backward",
        type=parse_seconds,
        default=0.1,
        help="seconds of the backward pass, in which tensors become ready one after the other, "
        "evenly, the last first (default 0.1)",
    )
    choose("--save", metavar="FILE", help="write the plan there, for Plan.load()")
    choose("--plot", metavar="FILE", help="draw the planned step's timeline there: a .png or .svg")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    try:
        _run(options)
    except (CgxError, OSError, ValueError) as error:
        print(f"python -m cgx_ops plan: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    tensors = [pair for given in options.sizes for pair in given]
    model = _Model.of(tensors, options.backward)
    if not tensors:
        raise InvalidArgument("the model has no tensors")
    if len(model.numels) < len(tensors):
        raise InvalidArgument("two tensors have one name")
    config = Config(bits=options.bits, bucket_size=options.bucket_size)
    plan, table = _planned(model, config, options.hosts, options.link)
    table.print()
    if options.save:
        plan.save(options.save)
        print(f"The plan is in {options.save}.")
    if options.plot:
        sizes = [encoded_bytes(numel, config) for numel in plan.numels]
        costs = typical_costs(options.link, options.hosts, config.bits)
        messages = timeline(plan.groups, plan.numels, model.ready, sizes, costs)
        draw(options.plot, f"{table.title}; {len(messages)} messages", messages)
        print(f"The timeline is in {options.plot}.")


# ---- 1. the model --------------------------------------------------------------------------------


class _Model(NamedTuple):
    """Tensors by name, and seconds until each one's gradient is ready."""

    numels: dict[str, int]
    ready: list[float]

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, int]], backward: float) -> "_Model":
        count = len(tensors)
        numels = {name or str(i): numel for i, (name, numel) in enumerate(tensors)}
        return cls(numels, [backward * (count - i) / count for i in range(len(numels))])


def _tensors(text: str) -> list[tuple[str, int]]:
    """Return names and numels: of a number, which has no name, or of a JSON file."""
    if text.isdecimal():
        return [("", int(text))]
    try:
        model = json.loads(Path(text).read_text(), object_pairs_hook=_each_once)
        return [(name, _numel(name, of)) for name, of in model.items()]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of values nor a JSON file of names and shapes: {error}"
        ) from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, of in pairs:
        if name in found:
            raise ValueError(f"it has the name {name!r} twice")
        found[name] = of
    return found


def _numel(name: str, of: Any) -> int:
    sizes = of if isinstance(of, list) else [of]
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{name!r} is {of!r}; it must be an integer >= 0, or a list of those")
    return math.prod(sizes)


def _hosts(text: str) -> int:
    if not 2 <= parse_count(text) < 2**31:
        raise argparse.ArgumentTypeError(
            f"{text} hosts: on one nothing is sent, and 2^31 are too many"
        )
    return int(text)


# ---- 2. what messages cost -----------------------------------------------------------------------


def typical_costs(link_rate: float, hosts: int, bits: int) -> Costs:
    """Return what messages cost by TCP between hosts with a rank each, by experience.

    Codecs as on one core with AVX2; 0.2 ms for each host that takes part in a message. measure()
    has the costs of a route that is there.

    Args:
        link_rate: bytes a second of each host's link, each way.
        hosts: at least 2.
        bits: of a value; in 32 the sum alone takes time.
    """
    encode, decode = (0.0, 0.25e-9) if bits == _EXACT.bits else (0.4e-9, 0.2e-9)
    return Costs(
        encode_fixed=20e-6,
        encode_per_value=encode,
        link_fixed=0.2e-3 * hosts,
        link_per_byte=2 * (hosts - 1) / hosts / link_rate,
        decode_fixed=20e-6,
        decode_per_value=decode,
        latency=0.1e-3,
    )


# ---- 3. the table --------------------------------------------------------------------------------


def _planned(model: _Model, config: Config, hosts: int, link_rate: float) -> tuple[Plan, Table]:
    """Return the plan for compressed gradients, and what it is compared with."""
    plans: dict[int, Plan] = {}
    waits: dict[int, float] = {}  # seconds after the backward pass, planned, by bits
    rows: list[list[str]] = []
    for each in (_EXACT, config):
        costs = typical_costs(link_rate, hosts, each.bits)
        plan = Plan.of(model.numels, model.ready, costs, config=each, margin=1)
        plans[each.bits] = plan
        sizes = [encoded_bytes(numel, each) for numel in plan.numels]
        case = plan.numels, model.ready, sizes, costs
        groupings = {
            "per tensor": baselines.per_tensor(model.ready),
            "whole": baselines.whole(model.ready),
            "DDP, 1 and 25 MiB": baselines.ddp_buckets(plan.numels, model.ready),
            "best two (MergeComp)": baselines.two_groups(*case),
            "planned": plan.groups,
        }
        end = {name: finish(groups, *case) for name, groups in groupings.items()}
        waits[each.bits] = end["planned"] - max(model.ready)
        for name, groups in groupings.items():
            largest = max(sum(sizes[i] for i in group) for group in groups)
            rows.append(
                [
                    "exact" if each is _EXACT else f"{each.bits} bits", name, str(len(groups)),
                    f"{largest / baselines.MIB:.2f}", time_text(end[name]),
                    time_text(end[name] - max(model.ready)), f"{end[name] / end['planned']:.2f}",
                ]
            )  # fmt: skip
    bits = config.bits
    plan = plans[bits]
    table = Table(
        title=f"{len(plan.names)} tensors, {sum(plan.numels) / 1e6:.1f} M values; {hosts} hosts, "
        f"{rate_text(link_rate)}; backward {time_text(max(model.ready))}",
        columns=["", "groups", "messages", "largest, MiB", "step", "after backward", "to planned"],
        rows=rows,
        text_columns=2,
        sections=[len(rows) // 2],
        notes=[
            "step: until the last gradient is reduced, by docs/guides/planner.md's model with typical "
            "costs; planner.measure() has your route's.",
            _verdict(bits, waits[_EXACT.bits], waits[bits]),
        ],
    )
    return plan, table


def _verdict(bits: int, exact: float, compressed: float) -> str:
    """Return whether compression pays, in one sentence; times are after the backward pass."""
    if compressed < _WORTH * exact:
        return (
            f"On this link {bits} bits pay: after its backward pass a step waits "
            f"{time_text(compressed)} for gradients instead of {time_text(exact)}."
        )
    return (
        f"On this link {bits} bits do not pay: after its backward pass a step waits "
        f"{time_text(compressed)} for gradients, and {time_text(exact)} if they are exact."
    )
