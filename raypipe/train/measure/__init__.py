"""What a training step costs: time, FLOPs, memory, traces, TensorBoard."""
