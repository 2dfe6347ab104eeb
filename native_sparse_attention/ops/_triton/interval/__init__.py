"""Attention of every query over one interval of its sequence's keys: shared by compressed, window and
dense attention.
"""
