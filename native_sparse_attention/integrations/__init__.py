"""Functions of other libraries under their own names and arguments, served by the ops of this package."""
