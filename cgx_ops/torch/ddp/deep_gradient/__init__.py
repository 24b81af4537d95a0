"""Deep Gradient Compression as a communication hook."""
