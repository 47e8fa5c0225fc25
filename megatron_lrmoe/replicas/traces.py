"""Recorded loads: reading a trace of routed and retained pairs from a Parquet file.

A trace has the integer columns ``COLUMNS``, one row for each (iteration, microbatch, layer, source, expert) with any
pairs; rows that are not there count as 0. Other columns are ignored. Who owns an expert is not in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from megatron_lrmoe.replicas.plan import IntArray

COLUMNS = ("iteration", "microbatch", "layer", "source", "expert", "routed", "retained")
_STAGE = COLUMNS[:3]
_KEY = COLUMNS[:5]


@dataclass(frozen=True, eq=False)
class RecordedLoads:
    """Loads of one layer in one microbatch; arrays are read-only.

    Args:
        iteration: of training.
        microbatch: within the iteration.
        layer: of the model.
        routed_SE: (S, E) int64 pairs of each source and expert in forward.
        retained_SE: (S, E) int64 of those, the pairs that kept their backward.
    """

    iteration: int
    microbatch: int
    layer: int
    routed_SE: IntArray
    retained_SE: IntArray

    def __post_init__(self) -> None:
        self.routed_SE.setflags(write=False)
        self.retained_SE.setflags(write=False)


def read_trace(
    path: str | PathLike[str], sources: int | None = None, experts: int | None = None
) -> tuple[RecordedLoads, ...]:
    """Recorded loads by iteration, microbatch and layer, in rising order; all of them have the same shape.

    Args:
        path: a Parquet file.
        sources: S; the largest source found + 1 if None.
        experts: E; the largest expert found + 1 if None.

    Raises:
        ValueError: no Parquet file, or all that is wrong in it: a column that is missing or has other than whole
            numbers, a number out of range, two rows of the same key, retained > routed.
        ImportError: pyarrow is not installed.
        OSError: no such file, or it cannot be read.
    """
    sizes = {"source": sources, "expert": experts}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}s: found {size}, allowed is 1 or more, or None")
    columns, problems = _read_columns(path)
    problems += _wrong_rows(columns, sizes)
    if problems:
        raise ValueError(f"{path}: not a trace of loads:" + "".join(f"\n  {problem}" for problem in problems))
    if not len(columns["routed"]):
        return ()
    shape = (sources or int(columns["source"].max()) + 1, experts or int(columns["expert"].max()) + 1)
    return tuple(_records(columns, shape))


def _records(columns: dict[str, IntArray], shape: tuple[int, int]) -> Iterator[RecordedLoads]:
    order = np.lexsort([columns[name] for name in reversed(_STAGE)])
    starts = np.flatnonzero(~_same_as_before([columns[name][order] for name in _STAGE]))
    for rows in np.split(order, starts[1:]):
        place = columns["source"][rows], columns["expert"][rows]
        routed_SE, retained_SE = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        routed_SE[place], retained_SE[place] = columns["routed"][rows], columns["retained"][rows]
        iteration, microbatch, layer = (int(columns[name][rows[0]]) for name in _STAGE)
        yield RecordedLoads(iteration, microbatch, layer, routed_SE, retained_SE)


def _read_columns(path: str | PathLike[str]) -> tuple[dict[str, IntArray], list[str]]:
    """Columns that are there and hold whole numbers, and a description of each that does not."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("reading a trace needs pyarrow: pip install 'megatron-lrmoe[report]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read([name for name in COLUMNS if name in file.schema_arrow.names])
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error
    columns, problems = {}, []
    for name in COLUMNS:
        if name not in table.column_names:
            problems.append(f"column {name}: missing, needed are {', '.join(COLUMNS)}")
        elif not pa.types.is_integer(table[name].type):
            problems.append(f"column {name}: found type {table[name].type}, allowed are integer types")
        elif table[name].null_count:
            problems.append(f"column {name}: found {table[name].null_count} nulls, allowed are whole numbers")
        else:
            columns[name] = table[name].to_numpy().astype(np.int64)
    return columns, problems


def _wrong_rows(columns: dict[str, IntArray], sizes: dict[str, int | None]) -> Iterator[str]:
    """A description of each kind of mistake, as far as the columns are there."""

    def describe(rows: IntArray, names: tuple[str, ...], allowed: str) -> Iterator[str]:
        if len(rows):
            found = ", ".join(str(columns[name][rows[0]]) for name in names)
            more = f"; {len(rows)} such rows" if len(rows) > 1 else ""
            yield f"{', '.join(names)}: found {found} in row {rows[0]}, allowed is {allowed}{more}"

    for name, value_n in columns.items():
        yield from describe(np.flatnonzero(value_n < 0), (name,), "0 or more")
    for name, size in sizes.items():
        if size is not None and name in columns:
            yield from describe(np.flatnonzero(columns[name] >= size), (name,), f"0 to {size - 1}")
    if columns.keys() >= {"routed", "retained"}:
        above = np.flatnonzero(columns["retained"] > columns["routed"])
        yield from describe(above, ("retained", "routed"), "retained <= routed")
    if columns.keys() >= set(_KEY):
        order = np.lexsort([columns[name] for name in reversed(_KEY)])
        again = _same_as_before([columns[name][order] for name in _KEY])
        yield from describe(np.sort(order[again]), _KEY, "each only once")


def _same_as_before(sorted_columns: list[IntArray]) -> NDArray[np.bool_]:
    """Whether each row equals the row before it; the first does not."""
    same = np.zeros(len(sorted_columns[0]), bool)
    same[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in sorted_columns])
    return same
