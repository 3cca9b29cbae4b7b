"""Log-prob, entropy and shaped loss: the reference definition and its implementations."""
