"""Several settings over several seeds, each run a process of its own."""
