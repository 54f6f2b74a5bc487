"""A run that goes on when ranks are lost: who takes part, what they hold of each other, and how that is tried out."""
