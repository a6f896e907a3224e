"""Who computes: one module per backend, none imports another."""
