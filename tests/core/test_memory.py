"""What a plan takes, and where."""
