"""Functions and classes with the names and arguments of other libraries."""
