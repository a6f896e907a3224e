"""Judging the guard: a user's sets, baselines beside it, splits that don't flatter, figures with counts."""
