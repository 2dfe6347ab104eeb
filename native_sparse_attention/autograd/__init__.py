"""What the backward pass keeps and what it recomputes."""
