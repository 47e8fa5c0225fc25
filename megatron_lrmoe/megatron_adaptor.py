"""``import megatron_lrmoe.megatron_adaptor`` right after ``import torch`` turns the plugin on.

Nothing changes in a run that is not given ``--moe-lrm-retention``. In a job that torchrun has started on a machine
without an accelerator, Megatron is put on the CPU device too: a patched ``pretrain_gpt.py`` needs that there.
"""

import os
import sys

from megatron_lrmoe.mcore.adaptor import install

# Once Megatron is imported it is too late; and who imports the adaptor outside a job of torchrun decides alone.
if "TORCHELASTIC_RUN_ID" in os.environ and "megatron.core" not in sys.modules:
    from megatron_lrmoe.device import activate_if_needed, with_cpu_flags

    if activate_if_needed():
        sys.argv[1:] = with_cpu_flags(sys.argv[1:])

install()
