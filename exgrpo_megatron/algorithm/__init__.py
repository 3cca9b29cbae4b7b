"""The algorithm as pure functions of tensors: advantages, loss constants, replay schedule."""
