"""Loops over the selected blocks of a query or a query tile, and the epilogues behind them."""
