"""Attention of every query over one interval of its sequence's keys: what compressed and window attention have in
common, and dense attention too."""
