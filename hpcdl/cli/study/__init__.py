"""Commands for many runs: sweeps, searches, forecasts, reports, benchmarks."""
