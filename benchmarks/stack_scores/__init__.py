"""Public benchmark points: predicted, scored, and made into what a plan believes of stacks never measured here."""
