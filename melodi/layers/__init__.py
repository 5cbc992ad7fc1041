"""The paper's h(z, x, u): the frame that all kinds share, then one memory system a file."""
