"""Tests of megatron_lrmoe, and the case generators that ``benchmarks/`` shares with them."""
