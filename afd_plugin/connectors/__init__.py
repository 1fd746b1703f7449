"""What carries activations and routing from attention to experts, and results back."""
