"""Pictures and text made from a finished or running run."""
