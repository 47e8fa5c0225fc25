"""Recorded traces: what is read back, and every mistake that a file can have."""

import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_lrmoe.replicas.plan import IntArray
from megatron_lrmoe.replicas.traces import COLUMNS, VERSION_KEY, read_trace
from tests.loads import small_loads

Row = tuple[int, ...]


def write(path: Path, rows: list[Row], **types: pa.DataType) -> Path:
    """A trace of rows in the order of ``COLUMNS``."""
    arrays = [pa.array([row[place] for row in rows], types.get(name, pa.int64())) for place, name in enumerate(COLUMNS)]
    parquet.write_table(pa.table(arrays, names=list(COLUMNS)), path)
    return path


def rows_of(stage: tuple[int, int, int], routed_SE: IntArray, retained_SE: IntArray) -> list[Row]:
    """Rows of the places with any pair."""
    return [
        (*stage, int(s), int(e), int(routed_SE[s, e]), int(retained_SE[s, e]))
        for s, e in zip(*np.nonzero(routed_SE), strict=True)
    ]


def test_absent_rows_are_zero_and_sizes_are_the_largest_found(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.parquet", [(4, 0, 2, 1, 2, 7, 5), (4, 0, 2, 0, 0, 3, 0)])
    (record,) = read_trace(path)
    assert (record.iteration, record.microbatch, record.layer) == (4, 0, 2)
    assert record.routed_SE.tolist() == [[3, 0, 0], [0, 0, 7]]
    assert record.retained_SE.tolist() == [[0, 0, 0], [0, 0, 5]]
    assert record.routed_SE.dtype == record.retained_SE.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        record.routed_SE[0, 0] = 1


def test_records_come_in_order_with_one_shape(tmp_path: Path) -> None:
    stages = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    path = write(tmp_path / "trace.parquet", [(*stage, n, 0, n + 1, n) for n, stage in enumerate(stages)])
    records = read_trace(str(path))
    assert [(r.iteration, r.microbatch, r.layer) for r in records] == sorted(stages)
    assert [r.routed_SE.ravel().tolist() for r in records] == [[0, 0, 0, 4], [0, 0, 3, 0], [0, 2, 0, 0], [1, 0, 0, 0]]


def test_given_sizes_win_over_those_found(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.parquet", [(0, 0, 0, 0, 1, 2, 2)])
    assert read_trace(path, sources=3, experts=4)[0].routed_SE.shape == (3, 4)
    assert read_trace(path, experts=2)[0].routed_SE.shape == (1, 2)


@given(loads=st.lists(small_loads(), min_size=1, max_size=3), shuffle=st.randoms(use_true_random=False))
def test_what_was_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, loads: list, shuffle) -> None:
    sources = max(len(loads_SE) for loads_SE, _ in loads)
    experts = max(len(owner_E) for _, owner_E in loads)
    written = {(n, n % 2, 5 - n): (loads_SE, loads_SE // 2) for n, (loads_SE, _) in enumerate(loads) if loads_SE.any()}
    rows = [row for stage, arrays in written.items() for row in rows_of(stage, *arrays)]
    shuffle.shuffle(rows)
    path = write(tmp_path_factory.mktemp("traces") / "trace.parquet", rows, layer=pa.int16(), source=pa.uint8())
    records = read_trace(path, sources, experts)
    assert [(r.iteration, r.microbatch, r.layer) for r in records] == list(written)
    for record, (routed_SE, retained_SE) in zip(records, written.values(), strict=True):
        where = tuple(map(slice, routed_SE.shape))
        assert (record.routed_SE[where] == routed_SE).all() and record.routed_SE.sum() == routed_SE.sum()
        assert (record.retained_SE[where] == retained_SE).all() and record.retained_SE.sum() == retained_SE.sum()
        assert record.routed_SE.shape == (sources, experts)


def test_a_trace_without_rows_has_no_records(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "trace.parquet", [])) == ()


def test_other_columns_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.parquet", [(0, 0, 0, 0, 0, 1, 1)])
    parquet.write_table(parquet.read_table(path).append_column("note", pa.array(["x"])), path)
    assert read_trace(path)[0].routed_SE.tolist() == [[1]]


GOOD = (0, 0, 0, 0, 0, 5, 3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, (0, 0, 0, 0, 1, 5, -2)], "retained: found -2 in row 1, allowed is 0 or more"),
        ([(-1, 0, 0, 0, 1, 5, 2), GOOD], "iteration: found -1 in row 0, allowed is 0 or more"),
        ([GOOD, (0, 0, 0, 0, 1, 5, 6)], "retained, routed: found 6, 5 in row 1, allowed is retained <= routed"),
        (
            [(0, 0, 1, 0, 0, 1, 1), GOOD, (0, 0, 1, 0, 0, 2, 1), GOOD],
            "iteration, microbatch, layer, source, expert: found 0, 0, 1, 0, 0 in row 2, "
            "allowed is each only once; 2 such rows",
        ),
        ([GOOD, (0, 0, 0, 4, 0, 5, 3)], "source: found 4 in row 1, allowed is 0 to 3"),
        ([GOOD, (0, 0, 0, 3, 8, 5, 3)], "expert: found 8 in row 1, allowed is 0 to 7"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, rows: list[Row], message: str) -> None:
    path = write(tmp_path / "trace.parquet", rows)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_trace(path, sources=4, experts=8)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.parquet", [GOOD])
    parquet.write_table(parquet.read_table(path).drop_columns(["expert"]), path)
    with pytest.raises(ValueError, match="column expert: missing"):
        read_trace(path)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    rows = [(0, 0, 0, 9, 0, 5, 6), (0, 0, -1, 0, 0, 5, 3)]
    path = write(tmp_path / "trace.parquet", rows, iteration=pa.float32())
    table = parquet.read_table(path).drop_columns(["microbatch", "expert"])
    parquet.write_table(table.append_column("expert", pa.array([1, None], pa.int64())), path)
    with pytest.raises(ValueError) as caught:
        read_trace(path, sources=2)
    assert [
        line.strip().partition(", allowed")[0].partition(", needed")[0] for line in str(caught.value).splitlines()
    ] == [
        f"{path}: not a trace of loads:",
        "column iteration: found type float",
        "column microbatch: missing",
        "column expert: found 1 nulls",
        "layer: found -1 in row 1",
        "source: found 9 in row 0",
        "retained, routed: found 6, 5 in row 0",
    ]


def with_version(path: Path, version: str) -> Path:
    """The file, with a version of the format in its metadata."""
    table = parquet.read_table(path)
    parquet.write_table(table.replace_schema_metadata({VERSION_KEY: version}), path)
    return path


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "loads-0.parquet", [GOOD])
    assert len(read_trace(with_version(path, "1"))) == 1
    with_version(path, "2")
    parquet.write_table(parquet.read_table(path).drop_columns(["expert"]), path)
    message = "megatron_lrmoe_trace_version: found '2', allowed is '1', or none"
    with pytest.raises(ValueError) as caught:
        read_trace(path)
    assert str(caught.value).splitlines() == [f"{path}: not a trace of loads:", f"  {message}"]
    with pytest.raises(ValueError, match=re.escape(f"loads-0.parquet: {message}")):
        read_trace(tmp_path)


def test_a_folder_is_read_as_one_trace(tmp_path: Path) -> None:
    write(tmp_path / "loads-1.parquet", [(1, 0, 0, 0, 0, 4, 4), (0, 0, 0, 1, 0, 2, 1)], routed=pa.int16())
    write(tmp_path / "loads-0.parquet", [(0, 0, 0, 0, 1, 3, 0)])
    write(tmp_path / "loads-2.parquet", [])
    for name in ("placed-0.parquet", "other.parquet", "loads-3.parquet.tmp", ".loads-4.parquet"):
        (tmp_path / name).write_bytes(b"PAR1")
    records = read_trace(tmp_path)
    assert [(r.iteration, r.routed_SE.tolist()) for r in records] == [(0, [[0, 3], [2, 0]]), (1, [[4, 0], [0, 0]])]
    assert [r.retained_SE.tolist() for r in records] == [[[0, 0], [1, 0]], [[4, 0], [0, 0]]]
    assert read_trace(str(tmp_path), sources=3)[0].routed_SE.shape == (3, 2)


def test_a_key_in_two_files_is_refused_with_both_names(tmp_path: Path) -> None:
    write(tmp_path / "loads-0.parquet", [])
    write(tmp_path / "loads-1.parquet", [GOOD, (0, 0, 1, 0, 0, 1, 1)])
    write(tmp_path / "loads-2.parquet", [(7, 0, 0, 0, 0, 1, 1)])
    write(tmp_path / "loads-3.parquet", [(0, 0, 1, 0, 0, 1, 1), GOOD])
    with pytest.raises(ValueError) as caught:
        read_trace(tmp_path)
    assert str(caught.value).splitlines() == [
        f"{tmp_path}: not a trace of loads:",
        "  iteration, microbatch, layer, source, expert: found 0, 0, 0, 0, 0 in loads-1.parquet and loads-3.parquet, "
        "allowed is each only once; 2 such rows",
    ]


def test_problems_of_a_folder_name_their_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found no file loads-\*\.parquet, allowed is a folder with one or more"):
        read_trace(tmp_path)
    write(tmp_path / "loads-0.parquet", [GOOD, (0, 0, 0, 0, 1, 5, 6)])
    write(tmp_path / "loads-1.parquet", [(0, 0, -1, 0, 0, 5, 3)])
    with pytest.raises(ValueError) as caught:
        read_trace(tmp_path)
    assert [line.strip().partition(", allowed")[0] for line in str(caught.value).splitlines()] == [
        f"{tmp_path}: not a trace of loads:",
        "loads-0.parquet: retained, routed: found 6, 5 in row 1",
        "loads-1.parquet: layer: found -1 in row 0",
    ]
    (tmp_path / "loads-2.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"loads-2\.parquet: not a Parquet file"):
        read_trace(tmp_path)


@pytest.mark.parametrize("sizes", [{"sources": 0}, {"experts": -1}])
def test_a_wrong_size_is_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"(sources: found 0|experts: found -1), allowed is 1 or more"):
        read_trace(write(tmp_path / "trace.parquet", [GOOD]), **sizes)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    path.write_text("iteration,microbatch\n" * 10)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: not a Parquet file"):
        read_trace(path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"megatron-lrmoe\[report\]"):
        read_trace(tmp_path / "trace.parquet")
