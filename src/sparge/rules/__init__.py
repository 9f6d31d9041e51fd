"""What every backend must agree on: forced blocks, exact rows, the error budget."""
