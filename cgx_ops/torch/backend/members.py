"""Which processes a group of the backend "cgx" consists of, if that changes (torch's reconfigure).

Each process has a handle. A coordinator collects the handles of the next members and sends the same
list and a fresh uuid to all of them. They meet in the group's store under this uuid, without the
processes that are lost. A handle ends with the reconfiguration in which it was used.
"""

import datetime
import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from cgx_ops.torch._compat import parallel

_FORM = re.compile(r"cgx:(\d+):([0-9a-f]{16}):(\d+)")
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds between two looks at the store


@dataclass(frozen=True, order=True)
class Handle:
    """One process as a member of one group, until the group's next reconfiguration.

    Attributes:
        rank: its rank in the job when it created the group.
        process: a random text, so that no other process has this handle.
        generation: how many times the group was reconfigured in this process.
    """

    rank: int
    process: str
    generation: int = 0

    @classmethod
    def of_this_process(cls, rank: int) -> Self:
        """Return a new handle."""
        return cls(rank, secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the handle with this text.

        Raises:
            ValueError: it is not the text of a handle.
        """
        found = _FORM.fullmatch(text)
        if not found:
            raise ValueError(
                f"{text!r} is not a handle of the backend cgx: pass the results of "
                "torch.distributed._get_reconfigure_handle()"
            )
        return cls(int(found[1]), found[2], int(found[3]))

    def __str__(self) -> str:
        return f"cgx:{self.rank}:{self.process}:{self.generation}"

    def next(self) -> "Handle":
        """Return the handle of this process after a reconfiguration."""
        return Handle(self.rank, self.process, self.generation + 1)


class Meeting:
    """The members of one reconfiguration, as one of them sees it.

    Args:
        group: the name of the group.
        store: the group's part of the store.
        own: the handle of this process.
        handles: those of all next members. A list gives rank r to its r-th handle; a set gives
            ranks by the rank in the job.
        uuid: the number of this reconfiguration; a number may be used once.

    Attributes:
        rank: this process's rank among the members.
        size: their number.
        store: a part of the store that only they use.

    Raises:
        ValueError: a handle is malformed, listed twice or not of this process.
        DistBackendError: the uuid was used before.
    """

    def __init__(
        self,
        group: str,
        store: parallel.Store,
        own: Handle,
        handles: Sequence[str] | set[str],
        uuid: int,
    ) -> None:
        self._what = f"cgx, group '{group}', reconfigure with uuid {uuid}"
        self._own = own
        self._uuid, self._group_store = str(uuid), store
        self._members: list[Handle] = []
        self.store = parallel.PrefixStore(str(uuid), store)
        try:
            members = [Handle.parse(text) for text in handles]
            self._members = sorted(members) if isinstance(handles, set) else members
            self.size = len(members)
            self.rank = self._place()
            self._claim(uuid)
            store.set(f"at/{own}", self._uuid)
        except (ValueError, dist.DistBackendError) as error:
            self._refuse(str(error))
            raise

    def _place(self) -> int:
        """Return this rank's place among the members."""
        if len(set(self._members)) < self.size:
            raise ValueError(f"{self._what}: a handle is listed twice: pass each once")
        if self._own in self._members:
            return self._members.index(self._own)
        stale = [each for each in self._members if each.process == self._own.process]
        raise ValueError(
            f"{self._what}: the list has the handle {stale[0]} of this process, which ended with "
            f"an earlier reconfiguration; it is {self._own} now: collect the handles again"
            if stale
            else f"{self._what}: the {self.size} handles do not contain that of this process, "
            f"{self._own}: call it only in members"
        )

    def _claim(self, uuid: int) -> None:
        """Raise if this uuid was used before, or is used with other handles at the same time."""
        text = " ".join(str(each) for each in self._members)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        claimed = self.store.compare_set("members", "", digest).decode()
        if claimed == digest and self.store.add(f"came/{self._own}", 1) == 1:
            return
        raise dist.DistBackendError(
            f"{self._what}: uuid {uuid} was already used"
            f"{'' if claimed == digest else ' with other handles'}: one coordinator must choose a "
            "fresh uuid, and send the same handles to all members"
        )

    def _refuse(self, why: str) -> None:
        """Let the other members end, too: they have this process in their list."""
        for each in {self._own, *self._members}:
            if each.process == self._own.process:
                self.store.set(f"refused/{each}", why)

    def wait(self, timeout: datetime.timedelta) -> None:
        """Wait until all members have come.

        Raises:
            DistBackendError: a member refused, or did not come in time.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        awaited, pause = list(self._members), _SHORTEST_PAUSE
        while awaited := [each for each in awaited if not self.store.check([f"came/{each}"])]:
            for each in self._members:
                if self.store.check([f"refused/{each}"]):
                    why = self.store.get(f"refused/{each}").decode()
                    raise dist.DistBackendError(f"{self._what}: {each} refused: {why}")
            if time.monotonic() > deadline:
                missing = ", ".join(str(each) for each in awaited)
                raise dist.DistBackendError(
                    f"{self._what}: {self._own} waited {timeout.total_seconds():g} s for {missing} "
                    f"to call it; {self._cause(awaited)}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _cause(self, awaited: Sequence[Handle]) -> str:
        """Return why these members have not come, and the remedy."""
        elsewhere = {each: uuid for each in awaited if (uuid := self._other_uuid(each))}
        causes = [
            f"{each} is in the reconfiguration with uuid {elsewhere[each]}" for each in elsewhere
        ]
        if causes:
            causes = [f"{', '.join(causes)}: one coordinator must choose the uuid of all members"]
        if len(elsewhere) < len(awaited):
            causes.append("reconfigure without processes that are lost")
        return "; ".join(causes)

    def _other_uuid(self, member: Handle) -> str:
        """Return the uuid that a member has called with, if this process has not; else ""."""
        key = f"at/{member}"
        if not self._group_store.check([key]):
            return ""
        # Does not wait, as get() would if the member deletes the key now.
        uuid = self._group_store.compare_set(key, "", "").decode()
        if not uuid:
            return ""
        there = parallel.PrefixStore(uuid, self._group_store)
        was_there = uuid == self._uuid or there.check([f"came/{self._own}"])
        return "" if was_there else uuid  # a failed reconfiguration of both is no cause

    def end(self) -> None:
        """Delete this member's keys. All members have seen them."""
        self.store.delete_key(f"came/{self._own}")
        self._group_store.delete_key(f"at/{self._own}")
