"""Run sets of collective_cases and print a JSON list of digests for each set and rank.

Runs under mpirun on the world, or with --threads N on threads of this process.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import collective_cases, launch

import cgx_ops


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sets", nargs="+", choices=collective_cases.SETS)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600)
    arguments = parser.parse_args()
    for name in arguments.sets:
        cases = collective_cases.SETS[name]

        def digests(_rank: int, comm: cgx_ops.Communicator, cases: Any = cases) -> list[str]:
            return [collective_cases.run(case, comm) for case in cases]

        if arguments.threads:
            for result in launch.threads(arguments.threads, digests, timeout=arguments.timeout):
                print(json.dumps(result))
        else:
            world = cgx_ops.init()
            print(json.dumps([world.transport, *digests(world.rank, world)]))


main()
