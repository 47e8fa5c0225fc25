"""``import megatron_lrmoe.megatron_adaptor`` right after ``import torch`` turns the plugin on.

Nothing changes in a run that is not given ``--moe-lrm-retention``. In a job that torchrun has started on a machine
without an accelerator, Megatron is put on the CPU device too: a patched ``pretrain_gpt.py`` needs that there.
"""

import sys

from torch import distributed

from megatron_lrmoe.device import activate_if_needed, with_cpu_flags
from megatron_lrmoe.mcore.adaptor import install

# Later than this it cannot be activated any more; and who imports the adaptor in a program of their own decides alone.
if distributed.is_torchelastic_launched() and "megatron.core" not in sys.modules and activate_if_needed():
    sys.argv[1:] = with_cpu_flags(sys.argv[1:])
install()
