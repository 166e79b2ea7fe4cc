"""Arrays in, floats out."""
