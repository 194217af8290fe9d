"""Scripts that reproduce the paper's figures, and benchmarks."""

import os

# Before numpy and torch are imported: with another number of threads sums add in another order, and last digits differ.
os.environ.setdefault("OMP_NUM_THREADS", "1")
