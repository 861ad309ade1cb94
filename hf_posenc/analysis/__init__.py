"""What positions do, as numbers and as pictures."""
