"""Thin adapters that put the guard where other packages have a place for one."""
