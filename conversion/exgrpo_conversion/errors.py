"""Faults of a model folder that the user can put right."""


class ModelFolderError(ValueError):
    """A model folder that is missing, incomplete, damaged or of another model; names the file or tensor."""
