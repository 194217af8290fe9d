"""Time and memory: what measuring costs, how minutes are shared, what fits a graph."""
