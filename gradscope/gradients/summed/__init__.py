"""Summed gradients: of any weights, of intervals, of prompts, in as much memory as there is."""
