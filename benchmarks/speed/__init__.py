"""The parts of `benchmarks/kernels.py`: how it times, what it times, and how it says what came out."""
