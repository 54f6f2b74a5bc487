"""What guesses the next tokens of a text, one file each."""
