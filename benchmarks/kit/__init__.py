"""What all benchmarks share: the command line, goals, tables, the machine."""
