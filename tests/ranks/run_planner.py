"""Measure the costs of messages among processes; each rank prints its result."""

import json
from dataclasses import asdict

import cgx_ops
from cgx_ops.planner import measure

for bits in (4, 32):
    print(json.dumps(asdict(measure(cgx_ops.init(), cgx_ops.Config(bits=bits)))))
