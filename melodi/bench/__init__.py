"""Speed and memory here, next to the alternatives."""
