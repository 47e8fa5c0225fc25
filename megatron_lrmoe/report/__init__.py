"""What happened: training logs, comparisons, plots. No Megatron here."""
