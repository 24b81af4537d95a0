"""PowerSGD for any flat buffer of gradients: each matrix is averaged as two thin factors."""
