"""Benchmarks: every figure stands beside a named peer that did the same work in the same run."""
