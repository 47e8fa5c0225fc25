"""WHERE routed pairs are computed: replica plans, quotas chosen together with them, and rivals' policies."""
