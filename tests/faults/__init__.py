"""Long commands killed, starved and damaged at every moment: what they leave, and how the same command goes on."""
