"""Megatron on CPU and gloo, when there is no accelerator."""

from megatron_lrmoe.device.cpu import activate_if_needed
from megatron_lrmoe.device.flags import cpu_flags, with_cpu_flags

__all__ = ["activate_if_needed", "cpu_flags", "with_cpu_flags"]
