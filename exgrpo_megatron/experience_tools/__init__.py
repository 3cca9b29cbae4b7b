"""What `exgrpo experience` does with the stored answers of a run, a checkpoint or an exported folder."""
