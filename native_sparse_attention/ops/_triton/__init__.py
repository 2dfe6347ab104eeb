"""What the Triton backends share: where queries stand among keys, launches, and kernels that two ops use unchanged."""
