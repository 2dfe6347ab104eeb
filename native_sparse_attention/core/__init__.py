"""Argument checks, block geometry and backend choice, shared by all layers above."""
