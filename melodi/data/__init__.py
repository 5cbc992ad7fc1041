"""Text to tokens to segments."""
