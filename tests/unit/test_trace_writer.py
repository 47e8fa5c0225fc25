"""Writing traces: what is written is read back, files are whole, and no failure of the thread is lost."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from fractions import Fraction
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_lrmoe.replicas.plan import Limits
from megatron_lrmoe.replicas.planner import plan
from megatron_lrmoe.replicas.trace_writer import PLACED_COLUMNS, TraceWriter
from megatron_lrmoe.replicas.traces import COLUMNS, KEY, VERSION, VERSION_KEY, read_trace
from tests.loads import small_loads
from tests.plans import cases

Rows = dict[tuple[int, ...], int]
LONG = 30
"""Seconds after which a thread that should have ended is taken for stuck."""


def placed_rows(folder: Path) -> Rows:
    """Rows by (iteration, microbatch, layer, source, expert, rank), each of them in the files only once."""
    tables = [parquet.read_table(file).to_pydict() for file in sorted(folder.glob("placed-*.parquet"))]
    assert all(tuple(table) == PLACED_COLUMNS for table in tables)
    rows = [row for table in tables for row in zip(*table.values(), strict=True)]
    by_key = {row[:-1]: row[-1] for row in rows}
    assert len(by_key) == len(rows)
    return by_key


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


class Gate(NamedTuple):
    """Where files are written: the writer has come there, and it may go on."""

    reached: Event
    opened: Event


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A closed one."""
    gate, write_table = Gate(Event(), Event()), parquet.write_table

    def wait_and_write(table: pa.Table, file: BinaryIO) -> None:
        gate.reached.set()
        assert gate.opened.wait(LONG)
        write_table(table, file)

    monkeypatch.setattr(parquet, "write_table", wait_and_write)
    yield gate
    gate.opened.set()


@cases(ci=60, developer=15)
@given(data=st.data(), records_per_file=st.integers(1, 4), layers=st.integers(1, 3))
def test_what_is_recorded_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, records_per_file: int, layers: int
) -> None:
    folder, written, placed = tmp_path_factory.mktemp("trace"), {}, {}
    with closing(TraceWriter(folder, "dp0", records_per_file=records_per_file)) as writer:
        for n, (loads_SE, owner_E) in enumerate(data.draw(st.lists(small_loads(), min_size=1, max_size=6))):
            stage = (n // layers, n % 2, n % layers + 7 * n)
            found = plan(loads_SE, None, owner_E, 1, Limits(forward=Fraction(101, 100)))
            retained_SE = loads_SE - loads_SE // 3
            placement = (found.rows_SI, found.expert_I, found.rank_I)
            writer.record(*stage, loads_SE, retained_SE, *placement)
            written[stage] = (loads_SE, retained_SE)
            for (s, i), rows in np.ndenumerate(found.rows_SI):
                if rows:
                    placed[(*stage, s, int(found.expert_I[i]), int(found.rank_I[i]))] = int(rows)
    records = read_trace(folder)
    assert [(r.iteration, r.microbatch, r.layer) for r in records] == sorted(written)
    shape = tuple(np.max([loads_SE.shape for loads_SE, _ in written.values()], axis=0))
    for record in records:
        for found_SE, wanted_SE in zip(
            (record.routed_SE, record.retained_SE),
            written[record.iteration, record.microbatch, record.layer],
            strict=True,
        ):
            padded_SE = np.zeros(shape, np.int64)
            padded_SE[: wanted_SE.shape[0], : wanted_SE.shape[1]] = wanted_SE
            assert np.array_equal(found_SE, padded_SE)
    assert placed_rows(folder) == placed


def test_the_shape_of_a_call_without_pairs_is_read_back(tmp_path: Path) -> None:
    with closing(TraceWriter(tmp_path, "dp0")) as writer:
        writer.record(3, 0, 1, np.zeros((2, 6), np.int64), np.zeros((2, 6), np.int64))
    (record,) = read_trace(tmp_path)
    assert (record.iteration, record.layer) == (3, 1)
    assert record.routed_SE.shape == (2, 6) and not record.routed_SE.any()
    assert placed_rows(tmp_path) == {}


def test_without_a_plan_rows_are_placed_at_the_owner(tmp_path: Path) -> None:
    routed = [[1, 2, 3, 4], [5, 0, 7, 8]]
    with closing(TraceWriter(tmp_path, "dp0")) as writer:
        writer.record(0, 0, 0, routed, routed)
        writer.record(0, 0, 1, routed, routed, None, [3, 2, 1, 0], [0, 1, 1, 0])
    of_layer = [{key[3:]: rows for key, rows in placed_rows(tmp_path).items() if key[2] == layer} for layer in (0, 1)]
    assert of_layer[0] == {(s, e, e // 2): routed[s][e] for s in (0, 1) for e in range(4) if routed[s][e]}
    assert of_layer[1] == {(s, e, int(e in (1, 2))): routed[s][e] for s in (0, 1) for e in range(4) if routed[s][e]}


def test_columns_version_and_names(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    with closing(TraceWriter(folder, "dp1.ep0", records_per_file=2)) as writer:
        for iteration, layer in ((9, 0), (9, 1), (9, 2), (10, 0), (10, 1), (1000, 0)):
            writer.record(iteration, 0, layer, [[4]], [[2]])
    wanted = ["9-dp1.ep0-00000", "9-dp1.ep0-00001", "10-dp1.ep0-00000", "1000-dp1.ep0-00000"]
    for kind, columns in (("loads", COLUMNS), ("placed", PLACED_COLUMNS)):
        files = sorted(folder.glob(f"{kind}-*"))
        assert [re.sub(f"^{kind}-0*|.parquet$", "", file.name) for file in files] == wanted
        found = [parquet.read_table(file)["iteration"].unique().to_pylist() for file in files]
        assert found == [[9], [9], [10], [1000]]
        schema = parquet.read_schema(files[0])
        assert tuple(schema.names) == columns and {str(kind) for kind in schema.types} == {"int64"}
        assert parquet.read_metadata(files[0]).metadata[VERSION_KEY.encode()] == b"1" == VERSION.encode()
    assert len(names(folder)) == 8


def test_arrays_may_be_used_again_at_once(tmp_path: Path, gate: Gate) -> None:
    loads_SE = np.array([[5, 6]])
    with closing(TraceWriter(tmp_path, "dp0")) as writer:
        writer.record(0, 0, 0, loads_SE, loads_SE)
        loads_SE[:] = 0
        gate.opened.set()
    assert read_trace(tmp_path)[0].routed_SE.tolist() == read_trace(tmp_path)[0].retained_SE.tolist() == [[5, 6]]


def test_repeated_iterations_replace_their_files(tmp_path: Path) -> None:
    for count, iterations in ((5, (0, 1, 2)), (7, (1, 2, 3))):
        with closing(TraceWriter(tmp_path, "dp0", records_per_file=1)) as writer:
            for iteration in iterations:
                writer.record(iteration, 0, 0, [[count]], [[count]])
                writer.record(iteration, 0, 1, [[count]], [[count]])
    found = {(r.iteration, r.layer): int(r.routed_SE.item()) for r in read_trace(tmp_path)}
    assert found == {(n, layer): 7 if n else 5 for n in range(4) for layer in (0, 1)}


def test_many_records_from_two_threads(tmp_path: Path) -> None:
    iterations, layers, barrier = 5, 40, Barrier(2, timeout=LONG)

    def record(parity: int) -> None:
        for iteration in range(iterations):
            barrier.wait()
            for layer in range(parity, layers, 2):
                writer.record(iteration, 0, layer, [[iteration, layer]], [[0, layer]])

    with closing(TraceWriter(tmp_path, "dp0", records_per_file=16, queue_records=2)) as writer:
        threads = [Thread(target=record, args=(parity,), daemon=True) for parity in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    found = {(r.iteration, r.layer): (r.routed_SE.tolist(), r.retained_SE.tolist()) for r in read_trace(tmp_path)}
    assert found == {(n, k): ([[n, k]], [[0, k]]) for n in range(iterations) for k in range(layers)}
    assert len(names(tmp_path)) == 2 * iterations * 3


def test_record_waits_while_the_queue_is_full(tmp_path: Path, gate: Gate) -> None:
    with closing(TraceWriter(tmp_path, "dp0", records_per_file=1, queue_records=2)) as writer:
        done = [Event() for _ in range(6)]

        def record() -> None:
            for layer, event in enumerate(done):
                writer.record(0, 0, layer, [[1]], [[1]])
                event.set()

        thread = Thread(target=record, daemon=True)
        thread.start()
        # One is with the thread and two wait.
        assert done[2].wait(LONG)
        assert not done[3].wait(0.2)
        gate.opened.set()
        thread.join(LONG)
    assert len(read_trace(tmp_path)) == 6


def full_disk(table: pa.Table, file: BinaryIO) -> None:
    """Stands in for ``parquet.write_table``: room for the first bytes only."""
    file.write(b"PAR1")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_surfaces_in_close_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "write_table", full_disk)
    writer = TraceWriter(tmp_path, "dp0")
    writer.record(0, 0, 0, [[1]], [[1]])
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert names(tmp_path) == []


def test_a_failure_surfaces_in_the_next_record_and_in_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = parquet.write_table, Event()

    def fail_at_iteration_1(table: pa.Table, file: BinaryIO) -> None:
        if table["iteration"][0].as_py() == 1:
            failed.set()
            raise RuntimeError("the disk is gone")
        real(table, file)

    monkeypatch.setattr(parquet, "write_table", fail_at_iteration_1)
    writer = TraceWriter(tmp_path, "dp0", records_per_file=1)
    writer.record(0, 0, 0, [[1]], [[1]])
    writer.record(1, 0, 0, [[1]], [[1]])
    assert failed.wait(LONG)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        # The thread may still be on its way from the failure to where record() sees it.
        for iteration in range(2, 20_000):
            writer.record(iteration, 0, 0, [[1]], [[1]])
    with pytest.raises(RuntimeError, match="the disk is gone"):
        writer.close()
    assert [r.iteration for r in read_trace(tmp_path)] == [0]
    assert len(names(tmp_path)) == 2


def test_a_failure_frees_whoever_waits_for_the_queue(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_and_write = parquet.write_table

    def wait_and_fail(table: pa.Table, file: BinaryIO) -> None:
        wait_and_write(table, file)
        full_disk(table, file)

    monkeypatch.setattr(parquet, "write_table", wait_and_fail)
    writer = TraceWriter(tmp_path, "dp0", records_per_file=1, queue_records=1)
    full, told = Event(), Event()

    def record() -> None:
        with suppress(OSError):
            for layer in range(20_000):
                writer.record(0, 0, layer, [[1]], [[1]])
                if layer == 1:
                    full.set()
        told.set()

    thread = Thread(target=record, daemon=True)
    thread.start()
    assert full.wait(LONG)
    assert not told.wait(0.05)
    gate.opened.set()
    assert told.wait(LONG)
    with pytest.raises(OSError, match="No space left"):
        writer.close()


@pytest.mark.parametrize("broken", ["loads-", "placed-"])
def test_a_file_that_cannot_be_renamed_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    real = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if target.name.startswith(broken):
            raise PermissionError(f"{target.name}")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    writer = TraceWriter(tmp_path, "dp0")
    writer.record(0, 0, 0, [[1]], [[1]])
    with pytest.raises(PermissionError, match=broken):
        writer.close()
    # Loads never without their placed rows.
    assert [name[:7] for name in names(tmp_path)] == (["placed-"] if broken == "loads-" else [])


def test_what_an_earlier_crash_left_is_not_read(tmp_path: Path, gate: Gate) -> None:
    writer = TraceWriter(tmp_path, "dp0", records_per_file=1)
    writer.record(0, 0, 0, [[1]], [[1]])
    assert gate.reached.wait(LONG)
    (unfinished,) = names(tmp_path)
    assert unfinished.startswith("placed-") and unfinished.endswith(".parquet.tmp")
    gate.opened.set()
    writer.close()
    for name in names(tmp_path):
        (tmp_path / f"{name.replace('00000.', '00001.')}.tmp").write_bytes(b"PAR1")
    assert len(read_trace(tmp_path)) == 1


def record_into(writer: TraceWriter, **changed: object) -> None:
    """One good layer call, with some arguments changed."""
    good = {
        "iteration": 5,
        "microbatch": 0,
        "layer": 0,
        "routed_SE": [[4, 2], [0, 6]],
        "retained_SE": [[1, 2], [0, 5]],
        "placed_SI": [[3, 2, 1], [0, 6, 0]],
        "instance_expert_I": [0, 1, 0],
        "instance_rank_I": [0, 1, 1],
    }
    writer.record(**(good | changed))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"iteration": -1}, "iteration: found -1, allowed is a whole number from 0 to 999999999999"),
        ({"iteration": 10**12}, "iteration: found 1000000000000, allowed is a whole number"),
        ({"layer": 1.0}, "layer: found 1.0, allowed is a whole number"),
        ({"microbatch": True}, "microbatch: found True, allowed is a whole number"),
        ({"routed_SE": [4, 2]}, "routed_SE: found 1 dimensions, allowed are 2"),
        ({"routed_SE": [[4.0, 2.0], [0, 6]]}, "routed_SE: found values of type float64, allowed are integers"),
        ({"routed_SE": [[4, -2], [0, 6]]}, "routed_SE[0][1]: found -2, allowed is 0 to 2^63 - 1"),
        ({"routed_SE": [[], []]}, "routed_SE: found shape (2, 0), allowed is at least one source and one expert"),
        ({"retained_SE": [[1, 2]]}, "retained_SE: found shape (1, 2), allowed is (2, 2)"),
        ({"retained_SE": [[1, 2], [0, 7]]}, "retained_SE[1][1]: found 7, allowed is at most routed_SE"),
        ({"instance_rank_I": None}, "instance_expert_I, instance_rank_I: not both given"),
        ({"instance_expert_I": None, "instance_rank_I": None}, "instance_expert_I, instance_rank_I: not both given"),
        ({"instance_rank_I": [0, 1]}, "instance_rank_I: found shape (2,), allowed is (3,)"),
        ({"instance_expert_I": [0, 1, 2]}, "instance_expert_I[2]: found 2, allowed is 0 to 1"),
        ({"instance_rank_I": [0, 1, 2]}, "instance_rank_I[2]: found 2, allowed is 0 to 1"),
        ({"instance_rank_I": [1, 1, 1]}, "found an expert twice on a rank, allowed is once"),
        ({"placed_SI": [[3, 2], [0, 6]]}, "placed_SI: found shape (2, 2), allowed is (2, 3)"),
        ({"placed_SI": [[3, 2, 2], [0, 6, 0]]}, "placed_SI, summed to source and expert, [0][0]: found 5, allowed is"),
        ({"placed_SI": None}, "placed_SI, summed to source and expert, [0][0]: found 8, allowed is as many rows"),
        (
            {"placed_SI": None, "instance_expert_I": None, "instance_rank_I": None, "routed_SE": [[4, 2, 1], [0, 6, 1]]}
            | {"retained_SE": [[0] * 3] * 2},
            "routed_SE: found 3 experts and 2 sources, allowed is a multiple of the sources",
        ),
    ],
)
def test_a_wrong_argument_is_refused_and_the_rest_is_written(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with closing(TraceWriter(tmp_path, "dp0")) as writer:
        with pytest.raises(ValueError, match=re.escape(message)):
            record_into(writer, **changed)
        record_into(writer)
    assert [r.routed_SE.tolist() for r in read_trace(tmp_path)] == [[[4, 2], [0, 6]]]


def test_what_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    with closing(TraceWriter(tmp_path, "dp0", records_per_file=1)) as writer:
        record_into(writer)
        with pytest.raises(ValueError, match=f"{', '.join(KEY[:3])}: found 5, 0, 0 again, allowed is each once"):
            record_into(writer)
        record_into(writer, iteration=6)
        with pytest.raises(ValueError, match="iteration: found 5, allowed is 6, as recorded before, or later"):
            record_into(writer, layer=1)
    assert [(r.iteration, r.layer) for r in read_trace(tmp_path)] == [(5, 0), (6, 0)]


def test_a_closed_writer_takes_no_records(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, "dp0")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="the trace is closed"):
        record_into(writer)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"file_prefix": "a/b"}, "file_prefix: found 'a/b', allowed are"),
        ({"file_prefix": ""}, "file_prefix: found '', allowed are"),
        ({"records_per_file": 0}, "records_per_file: found 0, allowed is 1 or more"),
        ({"queue_records": 0}, "queue_records: found 0, allowed is 1 or more"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path: Path, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TraceWriter(tmp_path, **{"file_prefix": "dp0", **arguments})


def test_without_pyarrow_the_flag_and_the_extra_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"--moe-lrm-trace.*megatron-lrmoe\[report\]"):
        TraceWriter(tmp_path, "dp0")
