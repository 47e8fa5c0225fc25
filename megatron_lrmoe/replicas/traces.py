"""Recorded loads: reading a trace of routed and retained pairs from a Parquet file or a folder of them.

A trace has the integer columns ``COLUMNS``, one row for each (iteration, microbatch, layer, source, expert) with any
pairs; rows that are not there count as 0. Other columns are ignored. Who owns an expert is not in it.

A file may name the version of this format in its metadata, under ``VERSION_KEY``; ``TraceWriter`` does. Where rows of
an expert were computed is in other files, which are not read here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from megatron_lrmoe.replicas.plan import IntArray

COLUMNS = ("iteration", "microbatch", "layer", "source", "expert", "routed", "retained")
KEY = COLUMNS[:5]
LOADS = "loads-"
"""What the names of a folder's files with loads begin with; they end in ``.parquet``."""

VERSION_KEY, VERSION = "megatron_lrmoe_trace_version", "1"
_STAGE = COLUMNS[:3]


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
        path: a Parquet file, or a folder, of which all files ``loads-*.parquet`` are read.
        sources: S; the largest source found + 1 if None.
        experts: E; the largest expert found + 1 if None.

    Raises:
        ValueError: no Parquet file, or all that is wrong in it: another version of the format, a column that is
            missing or has other than whole numbers, a number out of range, two rows of the same key, also in two
            files, retained > routed.
        ImportError: pyarrow is not installed.
        OSError: no such file, or it cannot be read.
    """
    sizes = {"source": sources, "expert": experts}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}s: found {size}, allowed is 1 or more, or None")
    columns, problems = _read_folder(Path(path), sizes) if Path(path).is_dir() else _read_file(Path(path), sizes)
    if problems:
        raise ValueError(f"{path}: not a trace of loads:" + "".join(f"\n  {problem}" for problem in problems))
    if not len(columns["routed"]):
        return ()
    shape = (sources or int(columns["source"].max()) + 1, experts or int(columns["expert"].max()) + 1)
    return tuple(_records(columns, shape))


def import_pyarrow(purpose: str) -> tuple[ModuleType, ModuleType]:
    """The modules pyarrow and pyarrow.parquet.

    Raises:
        ImportError: pyarrow is not installed; says how to, and what for.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{purpose} needs pyarrow: pip install 'megatron-lrmoe[report]'") from error
    return pyarrow, parquet


def _records(columns: dict[str, IntArray], shape: tuple[int, int]) -> Iterator[RecordedLoads]:
    order = np.lexsort([columns[name] for name in reversed(_STAGE)])
    starts = np.flatnonzero(~_same_as_before([columns[name][order] for name in _STAGE]))
    for rows in np.split(order, starts[1:]):
        place = columns["source"][rows], columns["expert"][rows]
        routed_SE, retained_SE = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        routed_SE[place], retained_SE[place] = columns["routed"][rows], columns["retained"][rows]
        iteration, microbatch, layer = (int(columns[name][rows[0]]) for name in _STAGE)
        yield RecordedLoads(iteration, microbatch, layer, routed_SE, retained_SE)


def _read_folder(folder: Path, sizes: dict[str, int | None]) -> tuple[dict[str, IntArray], list[str]]:
    """Columns of all files, one file after the other, and all that is wrong."""
    files = sorted(folder.glob(f"{LOADS}*.parquet"))
    if not files:
        return {}, [f"found no file {LOADS}*.parquet, allowed is a folder with one or more"]
    tables, problems = [], []
    for file in files:
        table, wrong = _read_file(file, sizes)
        tables.append(table)
        problems += [f"{file.name}: {problem}" for problem in wrong]
    if problems:
        return {}, problems
    columns = {name: np.concatenate([table[name] for table in tables]) for name in COLUMNS}
    return columns, list(_keys_in_two_files(columns, files, [len(table["routed"]) for table in tables]))


def _read_file(path: Path, sizes: dict[str, int | None]) -> tuple[dict[str, IntArray], list[str]]:
    """Columns that are as they should be, and all that is wrong."""
    columns, problems = _read_columns(path)
    return columns, [*problems, *_wrong_rows(columns, sizes)]


def _read_columns(path: Path) -> tuple[dict[str, IntArray], list[str]]:
    """Columns that are there and hold whole numbers, and a description of each that does not."""
    pa, parquet = import_pyarrow("reading a trace")
    try:
        with parquet.ParquetFile(path) as file:
            metadata = file.metadata.metadata or {}
            version = metadata.get(VERSION_KEY.encode(), VERSION.encode()).decode(errors="replace")
            if version != VERSION:
                return {}, [f"{VERSION_KEY}: found {version!r}, allowed is {VERSION!r}, or none"]
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
    if columns.keys() >= set(KEY):
        order = np.lexsort([columns[name] for name in reversed(KEY)])
        again = _same_as_before([columns[name][order] for name in KEY])
        yield from describe(np.sort(order[again]), KEY, "each only once")


def _keys_in_two_files(columns: dict[str, IntArray], files: list[Path], lengths: list[int]) -> Iterator[str]:
    """A description of a key that two files have; ``columns`` are those of the files, one after the other."""
    order = np.lexsort([columns[name] for name in reversed(KEY)])
    again = np.flatnonzero(_same_as_before([columns[name][order] for name in KEY]))
    if len(again):
        first, second = order[again[0] - 1 : again[0] + 1]
        names = [files[n].name for n in np.searchsorted(np.cumsum(lengths), (first, second), side="right")]
        found = ", ".join(str(columns[name][first]) for name in KEY)
        more = f"; {len(again)} such rows" if len(again) > 1 else ""
        yield f"{', '.join(KEY)}: found {found} in {names[0]} and {names[1]}, allowed is each only once{more}"


def _same_as_before(sorted_columns: list[IntArray]) -> NDArray[np.bool_]:
    """Whether each row equals the row before it; the first does not."""
    same = np.zeros(len(sorted_columns[0]), bool)
    same[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in sorted_columns])
    return same
