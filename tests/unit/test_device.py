"""The CPU device: what torch answers once it is active. Each case in a process of its own, since it stays."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_lrmoe.device import cpu_flags, with_cpu_flags
from megatron_lrmoe.pretrain_gpt import refuse_not_carried
from megatron_lrmoe.run import main

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def test_torch_answers_as_with_a_gpu_and_ordinary_cpu_tensors_still_work() -> None:
    code = """
    from megatron_lrmoe.device import activate_if_needed
    import sys
    import torch

    plain = torch.arange(4.0)
    torch.manual_seed(5)
    drawn = torch.rand(3)
    assert activate_if_needed()
    everything = {**vars(torch.cuda), **{"to": torch.Tensor.to, "type": torch.Tensor.type}}
    assert activate_if_needed() and everything == {**vars(torch.cuda), "to": torch.Tensor.to,
                                                   "type": torch.Tensor.type}
    assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert "megatron.core" in sys.modules

    assert torch.cuda.is_available() and torch.cuda.device_count() == 3
    for device in ("cuda", "cuda:1", 1, torch.device("cuda"), torch.cuda.current_device()):
        assert torch.zeros(2, device=device).device.type == "cpu"
        assert plain.to(device) is plain
    assert plain.to("meta").is_meta and torch.empty(2, device="meta").is_meta
    assert plain.to(torch.float64).dtype == torch.float64
    assert plain.cuda() is plain and plain.pin_memory() is plain
    assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.device.type == "cpu"
    assert plain.type() == "torch.cuda.FloatTensor"
    assert plain.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert plain.type(torch.int64).tolist() == [0, 1, 2, 3]
    assert torch.equal(plain + 1, torch.tensor([1.0, 2.0, 3.0, 4.0]))

    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    state = torch.cuda.get_rng_state()
    after = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(2, device="cuda"), after)

    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    start.record()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
    end.record()
    assert start.elapsed_time(end) >= 0
    loader = torch.utils.data.DataLoader([1, 2], pin_memory=True)
    assert not loader.pin_memory and [batch.item() for batch in loader] == [1, 2]

    @torch.compile
    def compiled(x):
        import inspect
        return x + (2 if "compiled" == inspect.stack()[0].function else 0)

    assert compiled(1) == 3
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu
    assert maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True).tolist() == [1.0, 1.0]
    assert maybe_move_tensor_to_cpu(None, as_numpy=True) is None
    """
    run = run_python(code, LOCAL_WORLD_SIZE="3", RANK="0")
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("Megatron runs on the CPU device") == 1


def test_other_ranks_than_0_say_nothing() -> None:
    code = """
    from megatron_lrmoe.device import cpu
    cpu._replace_in_megatron = lambda: None
    print(cpu.activate_if_needed())
    """
    assert run_python(code, RANK="1").stdout == "True\n"


def test_a_late_activation_is_refused() -> None:
    code = """
    import sys, types
    sys.modules["megatron.core"] = types.ModuleType("megatron.core")
    from megatron_lrmoe.device import activate_if_needed
    activate_if_needed()
    """
    run = run_python(code)
    assert run.returncode == 1
    assert "RuntimeError: megatron.core was imported before the CPU device was activated" in run.stdout


def test_with_an_accelerator_nothing_changes() -> None:
    code = """
    import sys
    import torch
    torch.cuda.is_available = lambda: True
    before = dict(vars(torch.cuda))
    from megatron_lrmoe.device import activate_if_needed
    assert not activate_if_needed()
    assert dict(vars(torch.cuda)) == before
    assert torch.ones(1).type() == "torch.FloatTensor" and "megatron.core" not in sys.modules
    """
    run = run_python(code)
    assert run.returncode == 0, run.stdout
    assert "CPU device" not in run.stdout


def test_flags_that_the_user_gave_are_not_added_again() -> None:
    assert with_cpu_flags([]) == cpu_flags()
    given = ["--num-workers=3", "--transformer-impl", "transformer_engine"]
    flags = with_cpu_flags(given)
    assert flags[:3] == given
    assert "--num-workers" not in flags and flags.count("--transformer-impl") == 1
    assert flags[flags.index("--distributed-backend") + 1] == "gloo"


@pytest.mark.parametrize("argv", [[], ["nowhere/pretrain_gpt.py", "--num-layers", "2"]])
def test_a_script_that_is_not_there_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert (argv[0] if argv else "nothing") in message and "usage: torchrun" in message


def test_features_that_only_the_stock_script_has_are_refused_in_one_error() -> None:
    refuse_not_carried(["--num-layers", "2", "--logits-dtype=fp32"])
    with pytest.raises(ValueError) as caught:
        refuse_not_carried(["--sft", "--fim-rate=0.5", "--logits-load-dir", "x", "--export-quant-cfg", "y"])
    found = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert found == ["--sft", "--fim-rate", "--logits-load-dir", "--export-quant-cfg"]
