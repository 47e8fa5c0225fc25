"""HOW the kept pairs are computed and moved: compaction, the expert MLP's backward, grouped GEMM back ends."""
