"""What a recipe will take before anything is spent: ranks, parameters, bytes. Pure numbers; no torch, no process."""
