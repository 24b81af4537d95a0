"""PowerSGD as a communication hook."""
