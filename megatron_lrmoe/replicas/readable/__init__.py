"""The planner's solver in plain Python: the reference that ``replicas/compiled`` equals move by move."""
