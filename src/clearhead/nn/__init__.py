"""Layers of attention, for models of your own: every form of it, with positions, caches and observables."""
