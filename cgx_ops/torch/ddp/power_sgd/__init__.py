"""PowerSGD as a communication hook: each gradient matrix is sent as two thin factors."""
