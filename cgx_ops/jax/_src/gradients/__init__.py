"""value_and_grad and compress_grads."""
