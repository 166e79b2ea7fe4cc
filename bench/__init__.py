"""Side-by-side timings: ours, peers installed from PyPI, and peers' documented formulas at their batch size."""
