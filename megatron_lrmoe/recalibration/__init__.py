"""WHAT is kept: how many pairs of each expert keep their backward, and which. Pure torch and numpy, no Megatron."""
