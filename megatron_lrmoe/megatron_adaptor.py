"""``import megatron_lrmoe.megatron_adaptor`` right after ``import torch`` turns the plugin on.

Nothing changes in a run that is not given ``--moe-lrm-retention``.
"""

from megatron_lrmoe.mcore.adaptor import install

install()
