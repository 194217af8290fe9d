"""Exact token gradients: the analytic or autograd backward pass of several tokens at once, and their norms."""
