"""`python -m benchmarks.attention`: times of the ops, of `nsa` and of the layer."""
