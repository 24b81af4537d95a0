"""`python -m cgx_ops plan`: predict whether compression makes a model's steps faster on a link.

1. The model: tensors by name, and when their gradients are ready.
2. The costs of messages on such a link: typical values.
3. The table: exact and compressed steps in the usual groups and in planned ones, and a verdict.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cgx_ops._core.log import described
from cgx_ops._core.picture import new_figure
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_count, parse_rate, parse_seconds, rate_text, time_text
from cgx_ops._core.verdicts import EXACT, NO_DIFFERENCE
from cgx_ops.config import Config
from cgx_ops.errors import CgxError, InvalidArgument
from cgx_ops.planner import baselines
from cgx_ops.planner.model import Costs, Passage, finish, timeline
from cgx_ops.planner.plan import Plan
from cgx_ops.planner.plot import draw
from cgx_ops.planner.rates import bits_of, message_bytes

_EXACT = Config(bits=EXACT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.description = (
        "Predict the step time of a model on a link: exact and compressed, in the usual groups of "
        "tensors that share a message, and in the groups that cgx_ops.planner.partition finds. "
        "Nothing is measured: costs are typical values."
    )
    parser.epilog = (
        'The verdict is "no difference" if the planned steps, exact and compressed, differ by less '
        f"than {NO_DIFFERENCE:.0%}."
    )
    choose = parser.add_argument
    choose(
        "sizes",
        nargs="+",
        type=_tensors,
        metavar="SIZES",
        help="the tensors in the model's order: numbers of values, or a JSON file that maps names "
        "to a number or a shape, such as {n: list(p.shape) for n, p in model.named_parameters()}",
    )
    choose("--link", type=parse_rate, default="1gbit", help="rate of each host (default 1gbit)")
    choose("--hosts", type=_hosts, default=2, help="hosts with one rank each (default 2)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--bits", type=int, choices=range(1, 9), help="bits per value (default 4)")
    how.add_argument(
        "--rate",
        type=float,
        help="mean bits per value of compressor 'entropy', 0.25 to 8, instead of --bits",
    )
    default = Config().bucket_size
    choose(
        "--bucket-size",
        type=parse_count,
        default=default,
        help=f"values per bucket (default {default})",
    )
    choose(
        "--backward",
        type=parse_seconds,
        default=0.1,
        help="seconds of the backward pass. Gradients become ready evenly, the last tensor's "
        "first (default 0.1)",
    )
    choose("--save", metavar="FILE", help="write the plan to this file, for Plan.load()")
    choose("--plot", metavar="FILE", help="draw both planned steps: a .png, .svg or .pdf file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
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
        raise InvalidArgument("two tensors have the same name; names must be unique")
    if options.plot:
        new_figure(options.plot, 1, 1)  # a bad file name is refused before the table is printed
    bucket_size = options.bucket_size
    config = (
        Config(bits=options.bits or Config.bits, bucket_size=bucket_size)
        if options.rate is None
        else Config(compressor="entropy", rate=options.rate, bucket_size=bucket_size)
    )
    plans, table = _planned(model, config, options.hosts, options.link)
    table.print()
    if options.save:
        plans[config].save(options.save)
        print(f"The plan is in {options.save}.")
    if options.plot:
        exact, compressed = (
            _timeline(plan, model, each, options.hosts, options.link)
            for each, plan in plans.items()
        )
        count = f"{len(exact)} messages exact, {len(compressed)} {_words(config)}"
        draw(options.plot, f"{table.title}\n{count}", compressed, exact=exact)
        print(f"The timeline is in {options.plot}.")


def _timeline(
    plan: Plan, model: "_Model", config: Config, hosts: int, link_rate: float
) -> list[Passage]:
    sizes = [message_bytes(numel, config) for numel in plan.numels]
    costs = typical_costs(link_rate, hosts, config)
    return timeline(plan.groups, plan.numels, model.ready, sizes, costs)


# ---- 1. the model --------------------------------------------------------------------------------


class _Model(NamedTuple):
    """The values of each tensor by name, and the seconds until each gradient is ready."""

    numels: dict[str, int]
    ready: list[float]

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, int]], backward: float) -> "_Model":
        count = len(tensors)
        numels = {name or str(i): numel for i, (name, numel) in enumerate(tensors)}
        return cls(numels, [backward * (count - i) / count for i in range(len(numels))])


def _tensors(text: str) -> list[tuple[str, int]]:
    """Return (name, numel) pairs from a number (without a name) or from a JSON file."""
    if text.isdecimal():
        return [("", int(text))]
    try:
        model = json.loads(Path(text).read_text(), object_pairs_hook=_each_once)
        return [(name, _numel(name, of)) for name, of in model.items()]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of values or a JSON file of names and shapes: {error}"
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
            f"{text!r} is not a valid number of hosts: give 2 to 2^31 - 1 (one host sends nothing)"
        )
    return int(text)


# ---- 2. what messages cost -----------------------------------------------------------------------


def typical_costs(link_rate: float, hosts: int, config: Config) -> Costs:
    """Return typical costs of messages over TCP between hosts with one rank each.

    The codec's costs are those of one core with AVX2. Each host in a message adds 0.2 ms.
    measure() returns the costs of the network that you have.

    Args:
        link_rate: Bytes per second of each host's link, in each direction.
        hosts: Number of hosts, at least 2.
        config: How values are sent. 32 bits need no encoding: only the sum takes time.
    """
    encode, decode = 0.4e-9, 0.2e-9
    if config.bits == EXACT:
        encode, decode = 0.0, 0.25e-9
    elif config.compressor == "entropy":
        encode, decode = 5e-9, 2.5e-9
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


def _planned(
    model: _Model, config: Config, hosts: int, link_rate: float
) -> tuple[dict[Config, Plan], Table]:
    """Return the plans for exact and compressed gradients, and the table."""
    plans: dict[Config, Plan] = {}
    steps: list[float] = []  # planned: exact, compressed
    rows: list[list[str]] = []
    for each in (_EXACT, config):
        costs = typical_costs(link_rate, hosts, each)
        plan = Plan.of(model.numels, model.ready, costs, config=each, margin=1)
        plans[each] = plan
        sizes = [message_bytes(numel, each) for numel in plan.numels]
        case = plan.numels, model.ready, sizes, costs
        groupings = {
            "per tensor": baselines.per_tensor(model.ready),
            "whole": baselines.whole(model.ready),
            "DDP, 1 and 25 MiB": baselines.ddp_buckets(plan.numels, model.ready),
            "best two (MergeComp)": baselines.two_groups(*case),
            "planned": plan.groups,
        }
        end = {name: finish(groups, *case) for name, groups in groupings.items()}
        steps.append(end["planned"])
        for name, groups in groupings.items():
            largest = max(sum(sizes[i] for i in group) for group in groups)
            rows.append(
                [
                    "exact" if each is _EXACT else described(each), name, str(len(groups)),
                    f"{largest / baselines.MIB:.2f}", time_text(end[name]),
                    time_text(end[name] - max(model.ready)), f"{end[name] / end['planned']:.2f}",
                ]
            )  # fmt: skip
    plan = plans[config]
    table = Table(
        title=f"{len(plan.names)} tensors, {sum(plan.numels) / 1e6:.1f} M values; {hosts} hosts, "
        f"{rate_text(link_rate)}; backward {time_text(max(model.ready))}",
        columns=["", "groups", "messages", "largest, MiB", "step", "after backward", "vs. planned"],
        rows=rows,
        text_columns=2,
        sections=[len(rows) // 2],
        notes=[
            "step: from the start of the backward pass until the last gradient is reduced. "
            "Predicted with typical costs; docs/guides/planner.md shows how to measure yours.",
            _verdict(config, *steps),
        ],
    )
    return plans, table


def _words(config: Config) -> str:
    """Return how values are sent, after a verb: "in 4 bits" or "at rate 2"."""
    bits = bits_of(config)
    return f"at rate {bits:g}" if isinstance(bits, float) else f"in {bits} bits"


def _verdict(config: Config, exact: float, compressed: float) -> str:
    """Return in one sentence whether the compressed step is faster than the exact one."""
    what = described(config)
    times = (
        f"a planned step takes {time_text(compressed)} {_words(config)}, {time_text(exact)} exact"
    )
    if abs(exact - compressed) < NO_DIFFERENCE * max(exact, compressed):
        return f"Verdict: no difference; {times} (less than {NO_DIFFERENCE:.0%} apart)."
    if compressed < exact:
        ratio = f"{exact / compressed:.3g} times as fast"
        return f"Verdict: {what} {_verb(what)} faster; {times} ({ratio})."
    ratio = f"{compressed / exact:.3g} times as long"
    return f"Verdict: {what} {_verb(what)} slower; {times} ({ratio})."


def _verb(what: str) -> str:
    return "are" if what.endswith("bits") else "is"
