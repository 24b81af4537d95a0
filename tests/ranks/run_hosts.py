"""Run collectives on the hosts of benchmarks/hosts.py.

Each rank prints one line of JSON: host, transport, the files that ranks left in this host's
/dev/shm, and the digests of the cases.
"""

import json
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import collective_cases

import cgx_ops

CASES = [
    collective_cases.Case(100_003),
    collective_cases.Case(300_000, 2, 128, rounding="nearest"),
    collective_cases.Case(1000, dtype="bfloat16", algorithm="one_shot"),
]


def main() -> None:
    """Leave a file, then run the cases. After a collective all ranks have left their files."""
    world = cgx_ops.init()
    Path(f"/dev/shm/rank-{world.rank}").touch()
    digests = [collective_cases.run(case, world) for case in CASES]
    said = {
        "host": socket.gethostname(),
        "transport": world.transport,
        "files": sorted(file.name for file in Path("/dev/shm").glob("rank-*")),
        "digests": digests,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
