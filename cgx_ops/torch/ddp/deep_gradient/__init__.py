"""Deep Gradient Compression as a communication hook: ranks send their largest values."""
