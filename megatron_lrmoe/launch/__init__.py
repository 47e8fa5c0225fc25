"""From a checkout to a launched job: patches, recipes and launch lines (no Megatron)."""
