"""Measurements of speed, memory and learning; none of it is installed with the package."""
