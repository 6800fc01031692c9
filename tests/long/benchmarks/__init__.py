"""That the scripts in ``benchmarks`` run."""
