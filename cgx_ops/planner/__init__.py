"""The planner: which tensors share a message, in how many bits, and whether compression is faster.

It needs numpy only.

    model.py      costs of messages, and when the last gradient of a step is reduced
    partition.py  which tensors share a message: the best groups under that model
    baselines.py  groups without a plan, for comparison
    bits.py       the quantization error of a tensor, and its bits
    rates.py      the error and the rates of the compressor "entropy"
    cheapest.py   the search for the bits; clusters.py: CGX's bits by k-means, for comparison
    adaptive.py   bits that follow a model as it trains
    measure.py    measures the costs and the ready times
    plan.py       groups and bits as one value: save, load, compare across ranks
    tune.py       tries a few plans in real steps, and corrects the costs
    plot.py       draws the timeline of a step
    command.py    `python -m cgx_ops plan`

Groups are after MergeComp (Wang et al., "MergeComp: A Compression Scheduler for Scalable
Communication-Efficient Distributed Training", 2021), bits after L-GreCo (Alimohammadi et al.,
"L-GreCo: Layerwise-Adaptive Gradient Compression for Efficient and Accurate Deep Learning", 2022)
and CGX (Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep Learning",
Middleware 2022). See docs/guides/planner.md.
"""

from cgx_ops._core.codec import statistic
from cgx_ops.planner.adaptive import AdaptiveBits
from cgx_ops.planner.bits import allocate_bits, predicted_error
from cgx_ops.planner.clusters import cluster_bits
from cgx_ops.planner.measure import measure, ready_times
from cgx_ops.planner.model import Costs, Passage, finish, timeline
from cgx_ops.planner.partition import partition
from cgx_ops.planner.plan import Plan
from cgx_ops.planner.rates import allocate_rates
from cgx_ops.planner.tune import Tuned, tune

__all__ = [
    "AdaptiveBits",
    "Costs",
    "Passage",
    "Plan",
    "Tuned",
    "allocate_bits",
    "allocate_rates",
    "cluster_bits",
    "finish",
    "measure",
    "partition",
    "predicted_error",
    "ready_times",
    "statistic",
    "timeline",
    "tune",
]
