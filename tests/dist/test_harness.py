"""The gloo harness itself: results, failures, deaths and hangs, and that the next case works after each."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gloo import ROOT, HangError, Pool

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def bare2() -> Iterator[Pool]:
    """Two ranks without Megatron, since most cases here cost a restart."""
    pool = Pool(2, with_megatron=False)
    yield pool
    pool.close()


def rank_and_sum(x: torch.Tensor) -> tuple[int, torch.Tensor]:
    dist.all_reduce(x)
    return dist.get_rank(), x


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only rank one")
    wait_for_the_other()


def wait_for_the_other() -> None:
    dist.all_reduce(torch.ones(1))


def never_join() -> None:
    time.sleep(1000)


def hang() -> None:
    wait_for_the_other() if dist.get_rank() == 0 else never_join()


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    wait_for_the_other()


def settings() -> tuple[str, int, str | None, list[float]]:
    return dist.get_backend(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], torch.rand(2).tolist()


def megatron_is_loaded() -> bool:
    return "megatron.core" in sys.modules


def same(x: Any) -> Any:
    return x


def assert_works(pool: Pool) -> None:
    results = pool(rank_and_sum, torch.tensor([1.0, 2.0]))
    assert [rank for rank, _ in results] == list(range(pool.world_size))
    for _, total in results:
        assert total.tolist() == [pool.world_size, 2.0 * pool.world_size]


def test_workers_with_megatron_do_not_load_it_into_the_tests(gloo2: Pool) -> None:
    before = megatron_is_loaded()
    assert_works(gloo2)
    assert gloo2(megatron_is_loaded) == [True, True]
    assert megatron_is_loaded() == before


def test_workers_stay_single_threaded_and_every_case_starts_from_the_same_seed(gloo2: Pool) -> None:
    first, before = gloo2(settings), gloo2.pids
    assert first[0][:3] == ("gloo", 1, "1")
    assert gloo2(settings) == first
    assert gloo2.pids == before


def test_four_ranks() -> None:
    pool = Pool(4, with_megatron=False)
    assert_works(pool)
    pool.close()
    assert pool.pids == []


def test_tensors_travel_by_value(bare2: Pool) -> None:
    sent = {
        "strided": torch.arange(6.0).view(2, 3).t(),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    for got in bare2(same, sent):
        for name, tensor in sent.items():
            assert torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype
            assert got[name].stride() == tensor.stride() and type(got[name]) is type(tensor)


def test_a_local_function_is_refused_before_it_reaches_the_workers(bare2: Pool) -> None:
    assert_works(bare2)
    before = bare2.pids
    with pytest.raises((AttributeError, pickle.PicklingError), match="<lambda>"):
        bare2(lambda: None)
    assert bare2.pids == before


def test_failing_rank_is_reported_and_the_others_are_freed(bare2: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(KeyError, match="only rank one") as caught:
        bare2(fail_on_rank_one)
    assert time.monotonic() - start < 30
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 failed" in notes and "in fail_on_rank_one" in notes
    assert "rank 0 of the case was still at" in notes and "in wait_for_the_other" in notes
    assert_works(bare2)


def test_hang_fails_with_the_stack_of_every_rank(bare2: Pool) -> None:
    assert_works(bare2)
    start = time.monotonic()
    with pytest.raises(HangError, match="not finished after 3 s") as caught:
        bare2(hang, limit_s=3.0)
    assert 3 <= time.monotonic() - start < 20
    _, rank0, rank1 = str(caught.value).split("of the case was still at")
    assert "in wait_for_the_other" in rank0 and "in never_join" not in rank0
    assert "in never_join" in rank1 and "in wait_for_the_other" not in rank1
    assert_works(bare2)


def test_dead_rank_is_reported(bare2: Pool) -> None:
    with pytest.raises(Exception) as caught:
        bare2(die_on_rank_one)
    assert "rank 1 ended with exit code 7" in "\n".join(caught.value.__notes__)
    assert bare2.pids == []


def is_running(pid: int) -> bool:
    # A killed orphan stays a zombie where nobody reaps it.
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.strip() != "" and not state.startswith("Z")


def test_a_worker_dies_with_the_tests_even_in_the_middle_of_a_case() -> None:
    code = (
        "from tests.gloo import Pool; from tests.dist.test_harness import never_join, same\n"
        "pool = Pool(1, with_megatron=False); pool(same, 1); print(*pool.pids, flush=True); pool(never_join)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.1)
    survived = is_running(pid)
    if survived:
        os.kill(pid, signal.SIGKILL)
    assert not survived
