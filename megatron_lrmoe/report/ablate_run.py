"""Train what is missing of a grid: some cells at a time, each result written when it is there."""

import fcntl
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from megatron_lrmoe.report import ablate_code, ablate_results
from megatron_lrmoe.report.ablate_cells import Cell, Dataset
from megatron_lrmoe.report.ablate_code import Code
from megatron_lrmoe.report.ablate_plan import START, STOCK
from megatron_lrmoe.report.ablate_process import WORK, CellFailedError, Workers, refusals
from megatron_lrmoe.report.training_log import failure_tail


class SourceChangedError(Exception):
    """The package was edited while it trained, so that nobody can say what the result is of."""


def missing(cells: Iterable[Cell], output: Path) -> list[Cell]:
    """Cells without a result of their key; what others start from only if one of them is missing too."""
    lacking = [cell for cell in cells if ablate_results.read(cell, output) is None]
    needed = {cell.start for cell in lacking}
    return [cell for cell in lacking if cell.variant != START or cell.id in needed]


def refuse(cells: Iterable[Cell], output: Path) -> None:
    """Ask Megatron's parser about the flags of every setting, before anything is trained.

    Raises:
        ValueError: everything it and the plugin refuse, each with the cells concerned.
        CellFailedError: they could not be asked.
    """
    settings: dict[str, Cell] = {}
    for cell in cells:
        settings.setdefault(f"{cell.regime}/{START}" if cell.variant == START else cell.id.rpartition("/")[0], cell)
    concerned: dict[str, list[str]] = {}
    for name, problems in refusals(settings, output).items():
        for problem in problems:
            concerned.setdefault(problem, []).append(name)
    if concerned:
        raise ValueError("\n".join(f"{', '.join(names)}: {problem}" for problem, names in concerned.items()))


def prepare(datasets: Iterable[Dataset], output: Path) -> None:
    """Write the datasets that are not there.

    Raises:
        ValueError: the package with a text is not installed, or another failure of the data command.
    """
    for dataset in sorted(set(datasets), key=lambda d: d.prefix):
        if all((output / f"{dataset.prefix}{suffix}").exists() for suffix in (".bin", ".idx")):
            continue
        print(f"preparing {dataset.prefix}", flush=True)
        # A process of its own, because only mcore may import megatron.
        command = [sys.executable, "-m", "megatron_lrmoe.cli", "data", "corpus", "--name", dataset.corpus]
        command += ["--output", str(output / dataset.prefix)]
        command += ["--bytes", str(dataset.limit)] if dataset.limit else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"preparing {dataset.prefix} failed:\n{failure_tail(done.stderr)}")


@contextmanager
def alone(output: Path) -> Iterator[None]:
    """Hold the output directory's lock, which a kill releases.

    Raises:
        ValueError: another process holds it.
    """
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--output: found {output} in use by another run, allowed is one at a time") from error
        shutil.rmtree(output / WORK, ignore_errors=True)
        yield


class Grid:
    """Trains cells in threads, each with worker processes of its own.

    Args:
        cells: to train, in the order in which they are preferred.
        done: ids of cells that have their result.
        output: directory for everything.
        code: that the cells' keys were made of.
        jobs: processes that train at a time.
    """

    def __init__(self, cells: Sequence[Cell], done: Iterable[str], output: Path, code: Code, jobs: int) -> None:
        self.failures: list[str] = []
        self._waiting = list(cells)
        self._done = set(done)
        self._running = 0
        self._stop: Exception | bool = False
        self._output = output
        self._code = code
        self._jobs = jobs
        self._source = ablate_code.describe()
        self._changed = threading.Condition()
        self._bar = tqdm(total=sum(cell.iterations for cell in cells), unit="it", dynamic_ncols=True, mininterval=1)
        self._count, self._ended = len(cells), 0

    def run(self) -> None:
        """Train until nothing is left that can be trained.

        However it is left, no process of it lives on, and every finished cell has its result.

        Raises:
            SourceChangedError: the package is no longer the one that the cells' keys speak of.
            Exception: what else a thread met, such as a full disk.
        """
        workers = [Workers(self._output) for _ in range(min(self._jobs, self._count))]
        threads = [threading.Thread(target=self._work, args=(worker,), daemon=True) for worker in workers]
        self._describe()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._stop = self._stop or True
            while any(thread.is_alive() for thread in threads):
                for worker in workers:
                    worker.kill()
                time.sleep(0.05)
            self._bar.close()
        if isinstance(self._stop, Exception):
            raise self._stop
        self.failures += [f"{cell.id}: not trained, because what it starts from failed" for cell in self._waiting]

    def _work(self, workers: Workers) -> None:
        try:
            while cell := self._next():
                try:
                    self._train(cell, workers)
                finally:
                    self._leave(cell)
        except Exception as error:
            self._stop = self._stop or error
            with self._changed:
                self._changed.notify_all()
        finally:
            workers.close()

    def _next(self) -> Cell | None:
        """The first cell that can start now; waits until one can; None if there is nothing left to do here."""
        with self._changed:
            while not self._stop:
                for cell in self._waiting:
                    # A cell of more ranks than jobs runs alone.
                    fits = not self._running or self._running + cell.ranks <= self._jobs
                    if fits and (cell.start is None or cell.start in self._done):
                        self._waiting.remove(cell)
                        self._running += cell.ranks
                        return cell
                # What needs all the room is left to the thread that has it, which then need not start processes anew.
                if not self._running or all(cell.ranks >= self._jobs for cell in self._waiting):
                    return None
                self._changed.wait()
        return None

    def _leave(self, cell: Cell) -> None:
        with self._changed:
            self._running -= cell.ranks
            self._ended += 1
            self._changed.notify_all()
        self._describe()

    def _train(self, cell: Cell, workers: Workers) -> None:
        path = ablate_results.path_of(cell, self._output)
        if cell.variant == START:
            # Megatron does not save where half a checkpoint lies.
            shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lines, replies = workers.train(cell, path.with_suffix(".log"), self._advance)
            result = ablate_results.from_log(cell, lines, replies, self._code.versions, self._source)
        except (CellFailedError, ValueError) as error:
            if not self._stop:
                self.failures.append(str(error))
            return
        self._refuse_changed_source(cell)
        ablate_results.write(cell, result, self._output)
        self._done.add(cell.id)

    def _refuse_changed_source(self, cell: Cell) -> None:
        now, then = ablate_code.code(), self._code
        is_stock = cell.variant in (START, STOCK)
        if (now.stock, now.versions) != (then.stock, then.versions) or (now.lrm != then.lrm and not is_stock):
            raise SourceChangedError(f"the package's source changed while {cell.id} was trained; start again")

    def _advance(self) -> None:
        with self._changed:
            self._bar.update()

    def _describe(self) -> None:
        with self._changed:
            self._bar.set_description(f"{self._ended}/{self._count} runs")
