"""Benchmarks: every figure that the README shows is printed by a command in here. Timings are never tests."""
