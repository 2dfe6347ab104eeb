"""Gradients of q from gradients of logits that the kernel for dk and dv stores."""
