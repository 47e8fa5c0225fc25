"""The only room, with ``device``, that knows Megatron: flags, classes, metrics and how they get in."""
