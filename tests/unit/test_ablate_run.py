"""Training what is missing: order, resume, failures and the worker processes, without Megatron."""

import dataclasses
import os
import signal
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megatron_lrmoe.report import ablate_process, ablate_run
from megatron_lrmoe.report.ablate_cells import Cell
from megatron_lrmoe.report.ablate_process import CellFailedError, Workers, refusals
from megatron_lrmoe.report.ablate_results import path_of, write
from megatron_lrmoe.report.ablate_run import Grid, SourceChangedError, alone, missing
from tests.ablation import CODE, cells, result

REPLY = {"wall_s": 1.0, "cpu_s": 1.0, "pairs": 10}


def log_of(cell: Cell) -> list[str]:
    lines = [
        f"iteration {i}/ 9 | elapsed time per iteration (ms): 1.0 | lm loss: 2.0E+00 | x |\n"
        for i in range(cell.first, cell.last + 1)
    ]
    return [*lines, f"validation loss at iteration {cell.last} | lm loss value: 2.0E+00 | x |\n"]


class FakeWorkers:
    """In place of processes: what was trained, in which order, and how many ranks at a time."""

    lock: ClassVar[Any] = threading.Lock()
    trained: ClassVar[list[str]] = []
    fails: ClassVar[set[str]] = set()
    running = 0
    most = 0
    seconds = 0.02

    def __init__(self, directory: Path) -> None:
        self.killed = threading.Event()

    def train(self, cell: Cell, log: Path, on_iteration: Any) -> tuple[list[str], list[dict[str, Any]]]:
        kind = type(self)
        with kind.lock:
            kind.trained.append(cell.id)
            kind.running += cell.ranks
            kind.most = max(kind.most, kind.running)
        killed = self.killed.wait(kind.seconds)
        with kind.lock:
            kind.running -= cell.ranks
        if killed or cell.id in kind.fails or cell.variant in kind.fails:
            raise CellFailedError(f"{cell.id} failed")
        return log_of(cell), [REPLY]

    def kill(self) -> None:
        self.killed.set()

    def close(self) -> None:
        pass


@pytest.fixture
def workers(monkeypatch) -> type[FakeWorkers]:
    kind = type("Kind", (FakeWorkers,), {"trained": [], "fails": set(), "lock": threading.Lock()})
    monkeypatch.setattr(ablate_run, "Workers", kind)
    monkeypatch.setattr(ablate_run.ablate_code, "code", lambda: CODE)
    return kind


def train(wanted: list[Cell], output: Path, jobs: int = 1) -> Grid:
    waiting = missing(wanted, output)
    ids = {cell.id for cell in waiting}
    training = Grid(waiting, (cell.id for cell in wanted if cell.id not in ids), output, CODE, jobs)
    training.run()
    return training


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_cell_is_trained_once_and_after_what_it_starts_from(tmp_path, workers, jobs):
    wanted = list(cells(tmp_path).values())
    assert train(wanted, tmp_path, jobs).failures == []
    assert sorted(workers.trained) == sorted(cell.id for cell in wanted)
    at = {name: i for i, name in enumerate(workers.trained)}
    assert all(at[cell.start] < at[cell.id] for cell in wanted if cell.start)
    assert workers.most == jobs
    assert missing(wanted, tmp_path) == []


def test_a_second_call_trains_only_what_is_missing(tmp_path, workers):
    found = cells(tmp_path)
    train(list(found.values()), tmp_path)
    lost = ["warm/topk@0.8/s1", "scratch/stock/s2"]
    for name in lost:
        path_of(found[name], tmp_path).unlink()
    workers.trained.clear()
    train(list(found.values()), tmp_path)
    assert sorted(workers.trained) == sorted(lost)


def test_a_start_is_trained_again_only_for_a_cell_that_needs_it(tmp_path, workers):
    found = cells(tmp_path)
    train(list(found.values()), tmp_path)
    cell = found["warm/topk@0.8/s1"]
    start = found[cell.start or ""]
    path_of(start, tmp_path).unlink()
    assert missing(found.values(), tmp_path) == []
    path_of(cell, tmp_path).unlink()
    assert missing(found.values(), tmp_path) == [start, cell]


def test_a_changed_plan_trains_the_changed_cells_alone(tmp_path, workers):
    train(list(cells(tmp_path).values()), tmp_path)
    changed = cells(tmp_path, variants={"unbiased": {}, "topk": {"selection": "topk", "shrink": 0.5}})
    waiting = missing(changed.values(), tmp_path)
    assert {cell.variant for cell in waiting} == {"topk"}
    # No longer limited to retention 0.8 either.
    assert len(waiting) == 12


def test_a_failed_cell_leaves_no_result_and_the_rest_goes_on(tmp_path, workers):
    found = cells(tmp_path)
    workers.fails = {"scratch/topk@0.8/s1"}
    assert train(list(found.values()), tmp_path, 2).failures == ["scratch/topk@0.8/s1 failed"]
    assert [cell.id for cell in missing(found.values(), tmp_path)] == ["scratch/topk@0.8/s1"]


@pytest.mark.parametrize("jobs", [1, 3])
def test_without_what_it_starts_from_a_cell_is_not_trained(tmp_path, workers, jobs):
    found = cells(tmp_path)
    workers.fails = {"start"}
    failures = train(list(found.values()), tmp_path, jobs).failures
    late = [cell for cell in found.values() if cell.start]
    assert len(failures) == 4 + len(late)
    assert sum("what it starts from failed" in failure for failure in failures) == len(late)
    assert not {cell.id for cell in late} & set(workers.trained)


def test_a_cell_of_more_ranks_than_jobs_runs_alone(tmp_path, workers):
    regimes = {"wide": {"kind": "scratch", "iterations": 1, "ep": 4}, "scratch": {"iterations": 1}}
    wanted = list(cells(tmp_path, regimes=regimes).values())
    assert train(wanted, tmp_path, 2).failures == []
    assert workers.most == 4 and len(workers.trained) == len(wanted)


def test_an_incomplete_log_is_a_failure(tmp_path, workers, monkeypatch):
    cell = cells(tmp_path)["scratch/stock/s1"]
    monkeypatch.setattr(workers, "train", lambda self, cell, log, on_iteration: (log_of(cell)[1:], [REPLY]))
    assert "does not hold iterations 1 to 20" in train([cell], tmp_path).failures[0]
    assert missing([cell], tmp_path) == [cell]


@pytest.mark.parametrize(("variant", "stops"), [("topk@0.8", True), ("stock", False)])
def test_a_result_of_source_that_was_edited_meanwhile_is_not_kept(tmp_path, workers, monkeypatch, variant, stops):
    cell = cells(tmp_path)[f"scratch/{variant}/s1"]
    monkeypatch.setattr(ablate_run.ablate_code, "code", lambda: dataclasses.replace(CODE, lrm="edited"))
    if stops:
        with pytest.raises(SourceChangedError, match="changed while scratch/topk"):
            train([cell], tmp_path)
    else:
        train([cell], tmp_path)
    assert (missing([cell], tmp_path) == [cell]) == stops


def test_an_interrupt_ends_the_runs_and_keeps_what_is_finished(tmp_path, workers, monkeypatch):
    found = cells(tmp_path)
    done = found["scratch/stock/s1"]
    path_of(done, tmp_path).parent.mkdir(parents=True)
    write(done, result(done), tmp_path)
    workers.seconds = 60.0
    alive = threading.active_count()

    def interrupt() -> None:
        while len(workers.trained) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    # Python leaves the signal ignored where it was started so, as a shell starts what runs in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            train(list(found.values()), tmp_path, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert threading.active_count() <= alive + 1
    assert done not in missing(found.values(), tmp_path) and len(missing(found.values(), tmp_path)) == len(found) - 1


def test_two_runs_do_not_share_a_directory(tmp_path):
    with alone(tmp_path), pytest.raises(ValueError, match="in use by another run"), alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


WORKER = """
import json, os, sys
say = lambda text: (sys.stdout.write(text), sys.stdout.flush())
for line in sys.stdin:
    order = json.loads(line)
    if "runs" in order:
        refused = {name: [os.environ["RANK"]] for name in order["runs"]}
        say("\\nlrmoe-ablate-reply " + json.dumps({"refused": refused}) + "\\n")
        continue
    rank, flags = os.environ["RANK"], order["flags"]
    mode = flags[flags.index("--mode") + 1]
    say(f"rank {rank} of {os.environ['WORLD_SIZE']} pid {os.getpid()} in {os.getcwd()}\\n")
    if rank == "0":
        say("iteration 1/ 2 | elapsed time per iteration (ms): 1.0 | lm loss: 2.0E+00 | x |\\n")
    if mode == "dies" and rank == "0":
        os._exit(3)
    if mode == "fails" and rank == "0":
        say('Traceback: no such thing\\n\\nlrmoe-ablate-reply {"failed": true}\\n')
        continue
    if mode == "fails":
        import time; time.sleep(60)
    say('half a line\\nlrmoe-ablate-reply {"wall_s": 1.0, "cpu_s": 2.0, "pairs": 3}\\n')
"""


@pytest.fixture
def fake_module(tmp_path, monkeypatch) -> Path:
    (tmp_path / "fake_worker.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ablate_process, "MODULE", "fake_worker")
    output = tmp_path / "output"
    output.mkdir()
    return output


def cell_of(folder: Path, mode: str, ranks: int) -> Cell:
    cell = cells(folder)["scratch/stock/s1"]
    return dataclasses.replace(cell, flags=("--mode", mode), ranks=ranks)


def pids(lines: list[str]) -> set[str]:
    return {line.split()[5] for line in lines if " pid " in line}


def test_workers_stay_for_the_next_cell_and_change_with_its_ranks(tmp_path, fake_module):
    workers = Workers(fake_module)
    seen: list[int] = []
    try:
        one, replies = workers.train(cell_of(tmp_path, "works", 1), fake_module / "a.log", lambda: seen.append(1))
        again, _ = workers.train(cell_of(tmp_path, "works", 1), fake_module / "b.log", lambda: None)
        two, twice = workers.train(cell_of(tmp_path, "works", 2), fake_module / "c.log", lambda: None)
    finally:
        workers.close()
    assert seen == [1] and len(replies) == 1 and len(twice) == 2
    assert pids(one) == pids(again) and len(pids(two)) == 2 and not pids(one) & pids(two)
    assert f"in {fake_module}\n" in one[0] and "half a line\n" in one
    assert (fake_module / "a.log").read_text() == "".join(one)
    assert not list((fake_module / ".work").iterdir())
    for pid in map(int, pids(one) | pids(two)):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("mode", "ranks"), [("fails", 1), ("fails", 2), ("dies", 1)])
def test_a_failing_rank_ends_all_and_the_next_cell_begins_anew(tmp_path, fake_module, mode, ranks):
    workers = Workers(fake_module)
    try:
        with pytest.raises(CellFailedError, match=r"scratch/stock/s1 failed; the end of .*x\.log"):
            workers.train(cell_of(tmp_path, mode, ranks), fake_module / "x.log", lambda: None)
        lines, replies = workers.train(cell_of(tmp_path, "works", ranks), fake_module / "y.log", lambda: None)
        assert len(replies) == ranks and len(pids(lines)) == ranks
    finally:
        workers.close()


def test_refusals_are_asked_of_one_process(tmp_path, fake_module):
    cell = cells(tmp_path)["scratch/stock/s1"]
    assert refusals({"a": cell, "b": cell}, fake_module) == {"a": ["0"], "b": ["0"]}


def test_a_process_that_cannot_be_asked(tmp_path, fake_module, monkeypatch):
    monkeypatch.setattr(ablate_process, "MODULE", "no_such_module_here")
    with pytest.raises(CellFailedError, match="no_such_module_here"):
        refusals({"a": cells(tmp_path)["scratch/stock/s1"]}, fake_module)
