"""Recalibrated and compacted MoE backward for Megatron-LM.

Importing this package does nothing. ``import megatron_lrmoe.megatron_adaptor`` turns the plugin on.
"""

__version__ = "0.1.0"
