"""What a recipe may execute."""
