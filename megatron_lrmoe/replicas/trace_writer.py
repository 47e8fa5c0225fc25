"""Recording loads during training: one background thread writes them to files that ``read_trace`` takes.

There are two kinds of files. Their names begin with ``loads-`` and ``placed-`` and are the same from there on.

- loads: the columns ``traces.COLUMNS``, one row for each (iteration, microbatch, layer, source, expert) with any pairs.
  The last source and expert of a layer call have a row in any case, so that its shape can be read back.
- placed: the columns ``PLACED_COLUMNS``, one row for each of those and a rank, if the source sent any rows of the
  expert there.

Why two: routed and retained belong to a source and an expert, placed belongs to a rank too. In one table each load
would be there once for each rank that computes some of it: what the reader refuses as the same key twice, and what
whoever adds up a column counts twice.

A file is complete or absent: it is written under a name that ends in ``.tmp`` and renamed. The loads come last: where
they are, their placed rows are too. Both kinds carry the version of the format in their metadata.
"""

import contextlib
import operator
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Lock, Thread

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_lrmoe.replicas.plan import IntArray
from megatron_lrmoe.replicas.traces import COLUMNS, KEY, LOADS, VERSION, VERSION_KEY, import_pyarrow

PLACED = "placed-"
"""What the names of files with placed rows begin with."""

PLACED_COLUMNS = (*KEY, "rank", "placed")

_DIGITS = 12
"""Of an iteration in a file name, so that names sort by it."""


class TraceWriter:
    """Writes loads as they are recorded; any thread may record.

    A file ends with its iteration or with ``records_per_file``, whichever comes first, and is named by iteration,
    prefix and number within the iteration. Training that starts again from a checkpoint thus replaces the files of
    iterations that it repeats. Writers that share a folder need different prefixes, and groups of ranks whose
    sources have the same numbers need different folders.

    Args:
        folder: made if it is not there.
        file_prefix: letters, digits, dots, underscores and hyphens.
        records_per_file: at most.
        queue_records: that wait for the thread, at most.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: an argument out of range.
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        file_prefix: str,
        *,
        records_per_file: int = 128,
        queue_records: int = 64,
    ):
        self._pyarrow, self._parquet = import_pyarrow("writing a trace (--moe-lrm-trace)")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", file_prefix):
            raise ValueError(f"file_prefix: found {file_prefix!r}, allowed are A-Z, a-z, 0-9, '.', '_' and '-'")
        for name, value in (("records_per_file", records_per_file), ("queue_records", queue_records)):
            if value < 1:
                raise ValueError(f"{name}: found {value}, allowed is 1 or more")
        self._folder, self._prefix, self._records_per_file = Path(folder), file_prefix, records_per_file
        self._folder.mkdir(parents=True, exist_ok=True)
        self._iteration, self._stages = 0, set[tuple[int, int, int]]()
        self._lock, self._closed = Lock(), False
        self._error: BaseException | None = None
        self._queue: Queue[_Record | None] = Queue(queue_records)
        self._thread = Thread(target=self._run, name="lrmoe-trace", daemon=True)
        self._thread.start()

    def record(
        self,
        iteration: int,
        microbatch: int,
        layer: int,
        routed_SE: ArrayLike,
        retained_SE: ArrayLike,
        placed_SI: ArrayLike | None = None,
        instance_expert_I: ArrayLike | None = None,
        instance_rank_I: ArrayLike | None = None,
    ) -> None:
        """Record the loads of one layer call; waits only while the queue is full. Arrays are copied.

        Args:
            iteration: of training, never below that of an earlier record.
            microbatch: within the iteration.
            layer: of the model; each (iteration, microbatch, layer) once.
            routed_SE: (S, E) pairs of each source and expert in forward.
            retained_SE: (S, E) of those, the pairs that keep their backward.
            placed_SI: (S, I) forward rows that each source sends to each instance; all to the experts' owners if None.
            instance_expert_I: (I,) expert of each instance; experts 0 to E-1 once each if None.
            instance_rank_I: (I,) rank of each instance; if None, owners are contiguous blocks of equal size.

        Raises:
            ValueError: a wrong argument, with its place, or the writer is closed.
            Exception: what stopped the thread; from then on nothing is written.
        """
        stage = _stage(iteration, microbatch, layer)
        loads = _checked_loads(routed_SE, retained_SE)
        record = _Record(stage, *loads, *_checked_placement(loads[0], placed_SI, instance_expert_I, instance_rank_I))
        with self._lock:
            self._raise_error()
            if self._closed:
                raise ValueError("the trace is closed, nothing more can be recorded")
            self._note(stage)
            self._queue.put(record)

    def close(self) -> None:
        """Write what is left and end the thread; of no effect when closed already.

        Raises:
            Exception: what stopped the thread.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def _note(self, stage: tuple[int, int, int]) -> None:
        """Keep in mind what is recorded of this iteration; refuse what would make files that cannot be read."""
        if stage[0] < self._iteration:
            raise ValueError(f"iteration: found {stage[0]}, allowed is {self._iteration}, as recorded before, or later")
        if stage[0] > self._iteration:
            self._iteration, self._stages = stage[0], set()
        if stage in self._stages:
            raise ValueError(f"{', '.join(KEY[:3])}: found {', '.join(map(str, stage))} again, allowed is each once")
        self._stages.add(stage)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        records = iter(self._queue.get, None)
        try:
            self._write_all(records)
        except BaseException as error:
            self._error = error
            # Whoever waits for room in the queue must go on, to be told by the next record() or close().
            for _ in records:
                pass

    def _write_all(self, records: "Iterable[_Record]") -> None:
        iteration, part, batch = -1, 0, list[_Record]()
        for record in records:
            if record.stage[0] != iteration:
                self._write(batch, part)
                iteration, part, batch = record.stage[0], 0, []
            batch.append(record)
            if len(batch) == self._records_per_file:
                self._write(batch, part)
                part, batch = part + 1, []
        self._write(batch, part)

    def _write(self, batch: "list[_Record]", part: int) -> None:
        if not batch:
            return
        name = f"{batch[0].stage[0]:0{_DIGITS}}-{self._prefix}-{part:05}.parquet"
        self._write_file(PLACED + name, PLACED_COLUMNS, [record.placed_rows() for record in batch])
        self._write_file(LOADS + name, COLUMNS, [record.loads_rows() for record in batch])

    def _write_file(self, name: str, columns: tuple[str, ...], blocks: list[IntArray]) -> None:
        arrays = dict(zip(columns, np.concatenate(blocks, axis=1), strict=True))
        table = self._pyarrow.table(arrays, metadata={VERSION_KEY: VERSION})
        temporary = self._folder / f"{name}.tmp"
        try:
            with temporary.open("wb") as file:
                self._parquet.write_table(table, file)
                file.flush()
                # Else a machine that goes down may keep the new name and lose what is in the file.
                os.fsync(file.fileno())
            temporary.replace(self._folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@dataclass(frozen=True, eq=False)
class _Record:
    """One layer call: (iteration, microbatch, layer), and arrays as in ``TraceWriter.record``."""

    stage: tuple[int, int, int]
    routed_SE: IntArray
    retained_SE: IntArray
    placed_SI: IntArray
    expert_I: IntArray
    rank_I: IntArray

    def loads_rows(self) -> IntArray:
        """(columns, rows) in the order of ``COLUMNS``."""
        there_SE = self.routed_SE > 0
        there_SE[-1, -1] = True
        place = np.nonzero(there_SE)
        return self._rows(*place, self.routed_SE[place], self.retained_SE[place])

    def placed_rows(self) -> IntArray:
        """(columns, rows) in the order of ``PLACED_COLUMNS``."""
        source, instance = np.nonzero(self.placed_SI)
        return self._rows(source, self.expert_I[instance], self.rank_I[instance], self.placed_SI[source, instance])

    def _rows(self, *columns: IntArray) -> IntArray:
        stage = (np.full(len(columns[0]), value, np.int64) for value in self.stage)
        return np.stack([*stage, *columns])


def _stage(*numbers: int) -> tuple[int, int, int]:
    for name, number in zip(KEY, numbers, strict=False):
        most = 10**_DIGITS - 1
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number <= most:
            raise ValueError(f"{name}: found {number!r}, allowed is a whole number from 0 to {most}")
    iteration, microbatch, layer = map(operator.index, numbers)
    return iteration, microbatch, layer


def _checked_loads(routed: ArrayLike, retained: ArrayLike) -> tuple[IntArray, IntArray]:
    """routed_SE and retained_SE."""
    routed_SE, retained_SE = _whole("routed_SE", routed, 2), _whole("retained_SE", retained, 2)
    if not routed_SE.size:
        raise ValueError(f"routed_SE: found shape {routed_SE.shape}, allowed is at least one source and one expert")
    _check_shape("retained_SE", retained_SE, routed_SE.shape)
    _refuse("retained_SE", retained_SE, retained_SE > routed_SE, "at most routed_SE")
    return routed_SE, retained_SE


def _checked_placement(
    routed_SE: IntArray, placed: ArrayLike | None, expert: ArrayLike | None, rank: ArrayLike | None
) -> tuple[IntArray, IntArray, IntArray]:
    """placed_SI, instance_expert_I and instance_rank_I; those of the owners where they are not given."""
    sources, experts = routed_SE.shape
    if placed is None and expert is None and rank is None:
        if experts % sources:
            raise ValueError(
                f"routed_SE: found {experts} experts and {sources} sources, allowed is a multiple of the sources, or "
                "any number with instance_expert_I and instance_rank_I"
            )
        expert_I = np.arange(experts)
        return routed_SE, expert_I, expert_I // (experts // sources)
    if expert is None or rank is None:
        raise ValueError(
            "instance_expert_I, instance_rank_I: not both given, allowed is both, or neither and no placed_SI"
        )
    expert_I, rank_I = _whole("instance_expert_I", expert, 1), _whole("instance_rank_I", rank, 1)
    _check_shape("instance_rank_I", rank_I, expert_I.shape)
    _refuse("instance_expert_I", expert_I, expert_I >= experts, f"0 to {experts - 1}")
    _refuse("instance_rank_I", rank_I, rank_I >= sources, f"0 to {sources - 1}")
    if len(np.unique(expert_I * sources + rank_I)) < len(expert_I):
        raise ValueError("instance_expert_I, instance_rank_I: found an expert twice on a rank, allowed is once")
    placed_SI = routed_SE[:, expert_I] if placed is None else _whole("placed_SI", placed, 2)
    _check_shape("placed_SI", placed_SI, (sources, len(expert_I)))
    sent_SE = np.zeros_like(routed_SE)
    np.add.at(sent_SE.T, expert_I, placed_SI.T)
    _refuse("placed_SI, summed to source and expert, ", sent_SE, sent_SE != routed_SE, "as many rows as in routed_SE")
    return placed_SI, expert_I, rank_I


def _whole(name: str, values: ArrayLike, dims: int) -> IntArray:
    """A copy as int64."""
    array = np.array(values)
    if array.ndim != dims:
        raise ValueError(f"{name}: found {array.ndim} dimensions, allowed are {dims}")
    # An empty list has no integer type.
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{name}: found values of type {array.dtype}, allowed are integers")
    array = array.astype(np.int64, copy=False)
    _refuse(name, array, array < 0, "0 to 2^63 - 1")
    return array


def _check_shape(name: str, array: IntArray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name}: found shape {array.shape}, allowed is {shape}")


def _refuse(name: str, values: IntArray, wrong: NDArray[np.bool_], allowed: str) -> None:
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        raise ValueError(f"{name}{''.join(f'[{i}]' for i in place)}: found {values[place]}, allowed is {allowed}")
