"""`python -m chaos`: rounds over each transport, then a table; exit status 1 on any failure."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from chaos import checks, machine, report
from chaos.faults import FAULTS
from chaos.pool import Forked, Jobs, Pool, Server, Zygote
from chaos.referee import Referee, Result
from chaos.rounds import JOB_HOSTS, TRANSPORTS, make_round, transports_of
from chaos.worker import FRAMEWORKS


class Campaign:
    """Rounds of consecutive seeds over one transport, in several parallel lanes."""

    def __init__(
        self,
        transport: str,
        options: argparse.Namespace,
        server: Server,
        lateness: machine.Lateness,
        until: float,
    ) -> None:
        self.transport, self._options, self._server = transport, options, server
        self._lateness, self._until = lateness, until
        self._seeds = itertools.count(options.seed)
        self.results: list[Result] = []
        self.complaints: list[str] = []
        self.jobs = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        zygotes = {}
        if self.transport not in JOB_HOSTS:
            zygotes = {
                framework: Zygote(self._server, self.transport, framework)
                for framework in FRAMEWORKS
            }
        threads = [
            threading.Thread(target=self._lane, args=(zygotes,), daemon=True)
            for _ in range(min(self._options.lanes, self._options.rounds))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for zygote in zygotes.values():
            zygote.close()

    def _next(self) -> Iterator[int]:
        while True:
            with self._lock:
                seed = next(self._seeds)
            if seed >= self._options.seed + self._options.rounds or time.monotonic() > self._until:
                return
            yield seed

    def _lane(self, zygotes: dict[str, Zygote]) -> None:
        jobs = Jobs(self._server, self.transport)
        pool: Pool = Forked(zygotes) if zygotes else jobs
        try:
            for seed in self._next():
                self._round(seed, pool)
            self.complaints += pool.close()
        except BaseException:
            self.complaints.append(f"a lane ended early: {traceback.format_exc()}")
        self.jobs += jobs.started

    def _round(self, seed: int, pool: Pool) -> None:
        spec = make_round(self.transport, seed, self._options.fault)
        if self._options.verbose:
            print(spec, flush=True)
        workers = pool.take(spec)
        result = Referee(spec, workers, self._lateness).run()
        result.failures = checks.judge(result, self._lateness)
        closed = any(
            rank_state.played and rank_state.played.base_closed for rank_state in result.ranks
        )
        lost = closed or any(rank_state.died_at for rank_state in result.ranks)
        fate = "kill" if result.failures else "end" if lost else "keep"
        result.failures += pool.give_back(spec, workers, fate)
        self.results.append(result)
        if result.failures:
            print(report.failure(result), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="of each transport")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    parser.add_argument("--fault", choices=FAULTS, help="use this fault in every round")
    parser.add_argument("--lanes", type=int, default=4, help="number of parallel rounds")
    parser.add_argument("--seconds", type=float, default=1180, help="time limit of the whole run")
    parser.add_argument("--verbose", action="store_true", help="print each round before it starts")
    options = parser.parse_args()
    having = transports_of(options.fault) if options.fault else TRANSPORTS
    if foreign := set(options.transport or ()) - set(having):
        parser.error(f"'{options.fault}' occurs over {having} only, not over {foreign}")

    lateness, begin = machine.Lateness(), time.monotonic()
    until = begin + options.seconds  # limit of all transports together
    campaigns = []
    with tempfile.TemporaryDirectory(prefix="cgx-chaos-") as folder:
        server = Server(Path(folder))
        for transport in options.transport or having:
            campaigns.append(Campaign(transport, options, server, lateness, until))
            print(f"{transport}: seeds {options.seed} to {options.seed + options.rounds - 1}")
            campaigns[-1].run()
        server.close()
    results = [result for campaign in campaigns for result in campaign.results]
    complaints = [text for campaign in campaigns for text in campaign.complaints]
    jobs = sum(campaign.jobs for campaign in campaigns)
    report.show(results, lateness.worst, time.monotonic() - begin, jobs)
    for complaint in complaints:
        print("FAILED at the end:", complaint)
    short = [c for c in campaigns if len(c.results) < options.rounds]
    for campaign in short:
        print(f"{campaign.transport}: time for {len(campaign.results)} rounds only")
    return int(bool(complaints or short) or any(result.failures for result in results))


if __name__ == "__main__":
    sys.exit(main())
