"""require_same(): different ranks all get one error, which names the first field that differs."""

import pytest
from support.launch import threads

from cgx_ops import Communicator, InvalidArgument, MismatchError
from cgx_ops._core.consistency import require_same
from cgx_ops._core.exchange import exchange

FIELDS = {"bits": 4, "rules": "a" * 600, "names": ["x", "y"]}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({}, ""),
        ({"bits": 8}, "job: rank 0 has bits 4, rank {last} has 8. Mend it"),
        ({"more": "x"}, "job: rank 0 has more nothing, rank {last} has x. Mend it"),
        ({"names": ["y"], "bits": 2}, "job: rank 0 has bits 4, rank {last} has 2. Mend it"),
    ],
)
def test_every_rank_gets_the_same_result(ranks: int, others: dict[str, object], text: str) -> None:
    def run(rank: int, communicator: Communicator) -> str:
        fields = FIELDS | (others if rank == ranks - 1 > 0 else {})
        try:
            require_same("job", fields, lambda b: exchange(b, "same", communicator), "Mend it")
        except MismatchError as error:
            return str(error)
        return ""

    expected = text.format(last=ranks - 1) if ranks > 1 else ""
    assert threads(ranks, run, timeout=20) == [expected] * ranks


def test_caller_sets_error_type_and_members() -> None:
    answers = [[b"1", b"2"], [b'{"bits": "4"}', b'{"bits": "8"}']]
    with pytest.raises(InvalidArgument, match="process 3 has bits 4, process 5 has 8"):
        require_same(
            "job", {"bits": 4}, lambda _: answers.pop(0), "Mend it",
            error=InvalidArgument, members=["process 3", "process 5"],
        )  # fmt: skip
