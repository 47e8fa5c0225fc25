"""A process that trains one cell of an ablation after another, because Megatron's start takes longer than a short cell.

Orders come as JSON lines on standard input, an end of which ends the process too. Standard output is Megatron's log;
every order is answered in it by one line that starts with ``REPLY``. What a run leaves in Megatron's globals is taken
down before the next one, so that a cell gives the same bits here as in a process of its own.
"""

import contextlib
import gc
import io
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_lrmoe.device import activate_if_needed, with_cpu_flags
from megatron_lrmoe.mcore.arguments import decoder_layers_with_experts
from megatron_lrmoe.mcore.command_line import command_line, parser_error
from megatron_lrmoe.report.ablate_process import REPLY


def main(rendezvous: str | None = None) -> None:
    """Answer orders until standard input ends.

    Args:
        rendezvous: file through which the ranks of ``WORLD_SIZE`` find each other; None only checks flags.
    """
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    activate_if_needed()
    from megatron_lrmoe.mcore.adaptor import install

    install()
    torch.set_num_threads(1)
    if rendezvous:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    while True:
        order = orders.get()
        try:
            _reply({"refused": check(order["runs"])} if "runs" in order else train(order["flags"]))
        except BaseException:
            traceback.print_exc()
            _reply({"failed": True})
            # Other ranks may wait in a collective, and Megatron's state is half made: the one who ordered ends us all.
            return
        gc.collect()


def train(flags: Sequence[str]) -> dict[str, Any]:
    """Train with Megatron's flags, as ``megatron_lrmoe.pretrain_gpt`` does.

    Returns:
        ``wall_s`` and ``cpu_s`` of the run and ``pairs``, the routed pairs of an iteration in all its MoE layers.
    """
    from megatron.training import get_args

    from megatron_lrmoe.mcore import gpt_training

    reset()
    wall, cpu = time.perf_counter(), time.process_time()
    with command_line(with_cpu_flags(flags)):
        gpt_training.train()
    sys.stdout.flush()
    return {
        "wall_s": round(time.perf_counter() - wall, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
        "pairs": routed_pairs(get_args()),
    }


def routed_pairs(args: Any) -> int:
    """(token, expert) pairs of one iteration, over all ranks and MoE layers, when nothing is over capacity."""
    return sum(decoder_layers_with_experts(args)) * args.global_batch_size * args.seq_length * args.moe_router_topk


def reset() -> None:
    """Take down what an earlier run left in Megatron's globals; process groups stay, and Megatron uses those it finds.

    Megatron forgets groups without ending them, and each keeps gloo threads.
    """
    from megatron.core import num_microbatches_calculator, rerun_state_machine
    from megatron.core.transformer.moe import moe_logging, moe_utils
    from megatron.training import global_vars

    from megatron_lrmoe.mcore import clock, metrics

    clock.follow()
    metrics.forget()
    global_vars.destroy_global_vars()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    moe_logging.destroy_moe_metrics_tracker()
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None


def check(runs: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """What Megatron's parser, its validation and the plugin's say against each run's flags, by its name.

    Args:
        runs: ``flags`` and ``ranks`` of each run by name. Runs without problems are left out of the answer.
    """
    return {name: found for name, run in runs.items() if (found := _problems(run["flags"], run["ranks"]))}


def _problems(flags: Sequence[str], ranks: int) -> list[str]:
    from megatron.training.arguments import parse_args, validate_args

    from megatron_lrmoe.mcore.arguments import config_from_args

    os.environ["WORLD_SIZE"] = str(ranks)
    errors = io.StringIO()
    try:
        with command_line(with_cpu_flags(flags)), contextlib.redirect_stderr(errors):
            args: Namespace = parse_args()
            # Before validate_args, which fills in what was not given.
            config_from_args(args)
            validate_args(args, {})
    except SystemExit:
        return [parser_error(errors.getvalue())]
    except ValueError as error:
        return [line for line in str(error).splitlines() if not line.endswith("with these flags:")]
    except (AssertionError, RuntimeError) as error:
        return [str(error).strip() or "Megatron refuses these flags without a word"]
    return []


def _read_orders(orders: "queue.SimpleQueue[dict[str, Any]]") -> None:
    """Read in a thread of its own, so that a process in the middle of a cell sees too that nobody waits for it."""
    for line in sys.stdin:
        orders.put(json.loads(line))
    # With what it has started: saving a checkpoint forks.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _reply(answer: dict[str, Any]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # One write, so that no other rank's output on the same pipe gets in between.
    os.write(1, f"\n{REPLY}{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:2])
