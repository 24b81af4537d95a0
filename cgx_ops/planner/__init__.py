"""The planner: whether gradients travel compressed, in what groups, and in how many bits.

    model.py      what a message costs, and when the last gradient of a step is there
    partition.py  which tensors share a message: the best groups under that model
    baselines.py  groups that need no plan, for comparison
    bits.py       what each tensor's quantization loses, and how many bits it therefore gets
    cheapest.py   the search behind that; clusters.py  CGX's bits by k-means, for comparison
    adaptive.py   bits that follow a model as it trains
    measure.py    the constants of the model, for a communicator's own route
    plan.py       groups and bits as one value: saved, loaded, agreed upon by ranks
    tune.py       a few plans tried in real steps, and costs that explain what these took
    plot.py       a step's timeline as a picture
    command.py    `python -m cgx_ops plan`: the table for a user's own model

Groups are after MergeComp (Wang et al., "MergeComp: A Compression Scheduler for Scalable
Communication-Efficient Distributed Training", 2021), bits after L-GreCo (Alimohammadi et al.,
"L-GreCo: Layerwise-Adaptive Gradient Compression for Efficient and Accurate Deep Learning", 2022)
and CGX (Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep Learning",
Middleware 2022). docs/guides/planner.md has it all on a page.
"""

from cgx_ops._core.codec import statistic
from cgx_ops.planner.adaptive import AdaptiveBits
from cgx_ops.planner.bits import allocate_bits, predicted_error
from cgx_ops.planner.clusters import cluster_bits
from cgx_ops.planner.measure import measure, ready_times
from cgx_ops.planner.model import Costs, Passage, finish, timeline
from cgx_ops.planner.partition import partition
from cgx_ops.planner.plan import Plan
from cgx_ops.planner.tune import Tuned, tune

__all__ = [
    "AdaptiveBits",
    "Costs",
    "Passage",
    "Plan",
    "Tuned",
    "allocate_bits",
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
