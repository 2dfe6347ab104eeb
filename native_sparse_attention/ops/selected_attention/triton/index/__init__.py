"""Indices over the block selection: from blocks to queries, and unions of query tiles."""
