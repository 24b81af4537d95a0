"""A few of torch's own tests of a backend; docs/guides/torch/backend.md shows how to run all."""

import pytest
from support import torch_suite

FEW = [
    "test_all_reduce_sum_async",
    "test_all_reduce_group_max",
    "test_all_reduce_sum_complex",
    "test_all_reduce_coalesced_sum",
    "test_sparse_all_reduce_sum",
    "test_all_gather_coalesced_simple",
    "test_barrier_full_group",
    "test_all_gather_object_subgroup",
    "test_send_recv_any_source_torch_profiler",
    "test_batch_isend_irecv_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_logging_data_cpu",
    "test_static_graph_api_cpu",
    "test_DistributedDataParallelCPU",
]


@pytest.mark.parametrize(
    "names", [FEW[::3], pytest.param(FEW, marks=pytest.mark.exhaustive)], ids=["a_third", "all"]
)
def test_a_few_of_torchs_own_tests(names: list[str]) -> None:
    outcomes = torch_suite.run_apart("cgx", 3, names, deadline=120)
    assert sorted(outcomes) == sorted(names), "the suite has changed"
    wrong = {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome["outcome"] != ("fail" if name in torch_suite.EXPLAINED else "pass")
    }
    assert not wrong, wrong
