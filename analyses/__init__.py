"""Scripts that reproduce the paper's figures, and benchmarks."""

import os

# Set before numpy and torch are imported: another number of threads changes the order, and last digits, of sums.
os.environ.setdefault("OMP_NUM_THREADS", "1")
